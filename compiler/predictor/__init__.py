"""How long programs will take and what memory, before there is native code of them."""
