"""An ONNX decoder with past and present inputs as a function of some tokens a call that keeps its caches as states.

Files of Optimum, torch.onnx and ONNX Runtime's tools have inputs `input_ids` [batch, T], `attention_mask` [batch, P + T],
`position_ids` [batch, T] and `past_key_values.N.key` and `.value` [batch, heads, P, width], and outputs `logits` and
`present.N.key` and `.value`, which are the past with T more tokens. Here the past is a state of a fixed number of rows, of which
the mask hides those that are not written yet: where keys lie plays no part for attention, as their positions are given.

- One token, concatenated to its past: the Concat becomes a write of one row of the state, in place.
- Several tokens, concatenated: they lie behind the whole state, [rows + T] keys, and their rows are written to it afterwards.
- The file writes them behind the keys that the mask shows (GroupQueryAttention): the present is the state.

Inputs that follow from these are given, too: `cache_position` [T], for a batch of 1, and `num_logits_to_keep`: 0, for all.
Of several outputs beside the caches that named `logits` is taken.

A past without a dimension of tokens, such as `past_conv.N` [batch, channels, width], is a recurrent state: zeros for a sequence
without tokens, and what it was where a sequence gets none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...runtime.errors import UnsupportedModelError
from ...runtime.generation.session import RECURRENT
from ...runtime.target import Target
from ..frontend.dimensions import bind_dimensions
from ..frontend.shaping import bind_values
from ..ir.constants import add_constant
from ..ir.facts import infer_node
from ..ir.matching import static_shape
from ..ir.names import fresh_name
from ..ir.rewriter import operation
from ..pipeline import Context, parse_pipeline, run_pipeline
from ..pipeline.pass_table import PASSES
from .last_row import multiply_last_row

TOKENS, MASK, POSITIONS, BRANCH = "input_ids", "attention_mask", "position_ids", "use_cache_branch"
PLACES = "cache_position"  # of the new tokens, the same for all sequences
LOGITS, LOGITS_KEPT = "logits", ("num_logits_to_keep", "logits_to_keep")  # how many of the last ones are made; 0: all
ROWS_STEP = 64  # rows of a cache are a multiple: attention leaves out keys in steps that divide it
_PAST, _PRESENT = re.compile(r"^past(_key_values)?[._]?"), re.compile(r"^present(_key_values)?[._]?")
_ROWS_AXIS = 2
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_WRITERS = ("Pad", "TensorScatter")  # that read the past where GroupQueryAttention was
_RESOLVING = "canonicalize,eliminate-dead"  # sizes that the file computes become numbers
_FIX = "export a causal decoder with input_ids, attention_mask, position_ids and past_key_values.N.key and .value"


@dataclass(frozen=True, slots=True)
class Decoder:
    """An imported file: its output of logits, and the output that renews each past and each recurrent state, by the names of
    these."""

    model: ir.Model
    logits: str
    caches: Mapping[str, str]
    recurrent: Mapping[str, str]

    @property
    def has_positions(self) -> bool:
        """Whether it is told where tokens are."""
        return any(value.name in (POSITIONS, PLACES) for value in self.model.graph.inputs)

    @property
    def is_narrow(self) -> bool:
        """Whether it rounds what it computes to float16 or bfloat16, whatever the precision."""
        return any(value.dtype in _NARROW for node in self.model.graph.all_nodes() for value in node.outputs)


@dataclass(frozen=True, slots=True)
class Step:
    """A model with inputs tokens [batch, T] and counts [batch] and the output logits [batch, vocabulary]. Its other outputs renew
    its other inputs, `length` [batch] and the caches: `states` are these by those."""

    model: ir.Model
    states: Mapping[str, str]


def find_decoder(model: ir.Model) -> Decoder:
    """What is what among the inputs and outputs of an imported model.

    Raises:
        UnsupportedModelError: an input that no decoder has, a past without its present, or other shapes; which one, it says.
    """
    if BRANCH in (value.name for value in model.graph.inputs):
        model = bind_values(model, {BRANCH: np.ones(1, bool)})
    kept = [value for value in model.graph.inputs if value.name in LOGITS_KEPT]
    if kept:
        model = bind_values(model, {str(value.name): np.zeros(static_shape(value) or (), np.int64) for value in kept})
    inputs, outputs = ({str(value.name): value for value in values} for values in (model.graph.inputs, model.graph.outputs))
    pasts = {_PAST.sub("", name): name for name in inputs if _PAST.match(name)}
    presents = {_PRESENT.sub("", name): name for name in outputs if _PRESENT.match(name)}
    if TOKENS not in inputs or not pasts:
        missing = f"input {TOKENS}" if TOKENS not in inputs else "inputs past_key_values"
        raise UnsupportedModelError("model", f"it has no {missing}; its inputs are {', '.join(inputs)}", _FIX)
    for name in inputs:
        if name not in (TOKENS, MASK, POSITIONS, PLACES) and name not in pasts.values():
            raise UnsupportedModelError(f"input {name}", "no generator of texts knows what to give it", _FIX)
    recurrent = {name for name in pasts.values() if _is_recurrent(inputs[name])}
    for key, name in pasts.items():
        if key not in presents:
            raise UnsupportedModelError(f"input {name}", f"no output renews it: there is no present.{key}", _FIX)
        dims = list(inputs[name].shape or ())
        if name in recurrent:
            continue
        if len(dims) != 4 or not isinstance(dims[1], int) or not isinstance(dims[3], int):
            what = f"its shape is {inputs[name].shape}, where [batch, heads, tokens, width] with known heads and width is wanted"
            raise UnsupportedModelError(f"input {name}", what, _FIX)
    caches = {name: presents[key] for key, name in pasts.items()}
    if MASK not in inputs and caches.keys() - recurrent:
        raise UnsupportedModelError("model", f"it has no input {MASK}, which hides what is not written yet", _FIX)
    others = [name for name in outputs if name not in presents.values()]
    others = [LOGITS] if LOGITS in others else others
    if len(others) != 1:
        raise UnsupportedModelError("outputs", f"{', '.join(others) or 'none'} beside the caches, where logits are wanted", _FIX)
    rows = {name: present for name, present in caches.items() if name not in recurrent}
    return Decoder(model, others[0], rows, {name: present for name, present in caches.items() if name in recurrent})


def _is_recurrent(past: ir.Value) -> bool:
    """Whether a past has the same size after any number of tokens."""
    dims = list(past.shape or ())
    is_fixed = len(dims) > 1 and all(isinstance(dim, int) for dim in dims[1:])
    return is_fixed and not str(past.name).endswith(("key", "value"))


def step_model(decoder: Decoder, target: Target, batch: int, count: int, max_tokens: int, most: int) -> Step:
    """The decoder for `count` tokens a call, as one of several programs that take at most `most`.

    Raises:
        UnsupportedModelError: its presents are neither the past with the new tokens nor as large as the past.
        CompileError: a node does not take inputs of these shapes.
    """
    if batch > 1 and any(value.name == PLACES for value in decoder.model.graph.inputs):
        what = f"it tells one place for all sequences, of which {batch} would have places of their own"
        raise UnsupportedModelError(f"input {PLACES}", what, f"compile it with batch=1, or export {POSITIONS} instead")
    if not decoder.caches:
        return _Rewriting(_bound(decoder, target, batch, count, 0, count), decoder, 0, max_tokens).of_states()
    is_written = _writes_itself(decoder)
    spare = most if is_written else 1  # rows for tokens that only fill up a call
    rows = -(-(max_tokens + spare) // ROWS_STEP) * ROWS_STEP
    if is_written:
        return _Rewriting(_bound(decoder, target, batch, count, rows, rows), decoder, rows, max_tokens).as_written()
    if count == 1:
        one = _Rewriting(_bound(decoder, target, batch, 1, rows - 1, rows), decoder, rows, max_tokens)
        if (concats := one.concats()) is not None:
            return one.in_place(concats)
    return _Rewriting(_bound(decoder, target, batch, count, rows, rows + count), decoder, rows, max_tokens).behind()


def whole_model(decoder: Decoder, target: Target, batch: int, count: int) -> ir.Model:
    """The file's own logits [batch, count, vocabulary] of `count` tokens without a past, as a function of these alone."""
    bound = _bound(decoder, target, batch, count, 0, count)
    known = {}
    for value in bound.graph.inputs:
        shape = static_shape(value)
        assert shape is not None
        assert value.dtype is not None
        if value.name == MASK or value.name in decoder.caches:
            known[str(value.name)] = np.ones(shape, value.dtype.numpy())
        if value.name in decoder.recurrent:
            known[str(value.name)] = np.zeros(shape, value.dtype.numpy())
        if value.name in (POSITIONS, PLACES):
            known[str(value.name)] = np.broadcast_to(np.arange(count), shape).astype(value.dtype.numpy())
    whole = bind_values(bound, known)
    whole.graph.outputs[:] = [value for value in whole.graph.outputs if value.name == decoder.logits]
    return whole


def _writes_itself(decoder: Decoder) -> bool:
    """Whether the file writes new keys into its pasts, in the place of concatenating them."""
    pasts = [value for value in decoder.model.graph.inputs if value.name in decoder.caches]
    return all(any(reader.op_type in _WRITERS for reader in value.consumers()) for value in pasts)


def _bound(decoder: Decoder, target: Target, batch: int, count: int, past: int, total: int) -> ir.Model:
    """A copy of the model for these sizes."""
    shapes: dict[str, Sequence[int]] = {TOKENS: (batch, count), POSITIONS: (batch, count), MASK: (batch, total), PLACES: (count,)}
    free = decoder.model.clone()
    for value in free.graph.inputs:
        if value.name in decoder.caches:
            assert value.shape is not None
            shapes[str(value.name)] = batch, int(str(value.shape[1])), past, int(str(value.shape[3]))
        if value.name in decoder.recurrent:
            assert value.shape is not None
            shapes[str(value.name)] = batch, *(int(str(dim)) for dim in value.shape[1:])
        value.shape = ir.Shape([None] * len(shapes[str(value.name)]))  # a name may stand for several numbers here
    bound = bind_dimensions(free, {str(value.name): shapes[str(value.name)] for value in free.graph.inputs})
    run_pipeline(bound, parse_pipeline(_RESOLVING, PASSES), Context(target))
    return bound


class _Rewriting:
    """A bound copy of a decoder that becomes a step."""

    def __init__(self, model: ir.Model, decoder: Decoder, rows: int, max_tokens: int) -> None:
        self.model, self.graph, self.decoder = model, model.graph, decoder
        self.rows, self.max_tokens = rows, max_tokens
        self.inputs = {str(value.name): value for value in self.graph.inputs}
        self.outputs = {str(value.name): value for value in self.graph.outputs}
        self.graph.outputs[:] = [self.outputs[decoder.logits]]
        self.batch, self.count = static_shape(self.inputs[TOKENS]) or (0, 0)
        self.first = next(iter(self.graph))  # before which is computed what the file's inputs were
        self.counts, self.length = self._input("counts"), self._input("length")
        self.numbers = self._ints(range(self.count))
        self.places = self._op("Add", self._column(self.length), self.numbers)  # [batch, count]
        self.is_real = self._op("Less", self.numbers, self._column(self.counts))
        self.states: dict[ir.Value, ir.Value] = {}

    def concats(self) -> dict[str, ir.Node] | None:
        """The Concat that makes each present of its past, which nothing else reads; None where not all do."""
        found: dict[str, ir.Node] = {}
        for name, present in self.decoder.caches.items():
            readers = list(self.inputs[name].consumers())
            made = self.outputs[present]
            while (producer := made.producer()) is not None and producer.op_type == "Identity" and producer.inputs[0] is not None:
                made = producer.inputs[0]
            if producer is None or readers != [producer] or producer.op_type != "Concat" or len(producer.inputs) != 2:
                return None
            if producer.inputs[0] is not self.inputs[name] or producer.attributes.get_int("axis", 0) % 4 != _ROWS_AXIS:
                return None
            found[name] = producer
        return found

    def in_place(self, concats: Mapping[str, ir.Node]) -> Step:
        """One token, whose row is written where the Concat was."""
        index = self._op("Where", self.is_real, self.places, self._ints([self.rows - 1]))
        keys = self._ints(range(self.rows))
        self._seen(self._op("Or", self._op("Less", keys, self._column(self.length)), self._op("Equal", keys, index)))
        for name, concat in concats.items():
            past, new = self.inputs[name], concat.inputs[1]
            assert new is not None
            shape = static_shape(past) or ()
            past.shape = ir.Shape((*shape[:_ROWS_AXIS], self.rows, *shape[_ROWS_AXIS + 1 :]))
            written = self._write(past, new, index, concat)
            ir.convenience.replace_all_uses_with(concat.outputs[0], written)
            self.graph.remove(concat, safe=True)
            self.states[written] = past
        return self._step()

    def behind(self) -> Step:
        """Tokens behind all rows of the past: those that only fill up see themselves, and no other sees them."""
        index = self._op("Where", self.is_real, self.places, self._ints([self.rows - 1]))
        past_keys = self._op("Less", self._ints(range(self.rows)), self._column(self.length))
        new_keys = self._constant(np.ones((self.batch, self.count), bool))
        self._seen(self._op("Concat", past_keys, new_keys, axis=1))
        for name, present in self.decoder.caches.items():
            made = self.outputs[present]
            shape, past = static_shape(made), self.inputs[name]
            if shape is None or shape[_ROWS_AXIS] != self.rows + self.count:
                what = f"of {self.rows} tokens before and {self.count} new ones it makes {shape}"
                raise UnsupportedModelError(f"output {present}", what, _FIX)
            new = self._op("Slice", made, *map(self._ints, ([self.rows], [self.rows + self.count], [_ROWS_AXIS])), before=None)
            self.states[self._write(past, new, index, None)] = past
        return self._step()

    def as_written(self) -> Step:
        """The file writes all new tokens behind those that the mask showed before; what only fills up is overwritten later."""
        seen = self._op("Add", self.length, self._ints([self.count]))
        self._seen(self._op("Less", self._ints(range(self.rows)), self._column(seen)))
        for name, present in self.decoder.caches.items():
            if static_shape(self.outputs[present]) != static_shape(self.inputs[name]):
                what = f"it is {self.outputs[present].shape}, and its past {self.inputs[name].shape}"
                raise UnsupportedModelError(f"output {present}", what, _FIX)
            self.states[self.outputs[present]] = self.inputs[name]
        return self._step()

    def of_states(self) -> Step:
        """No keys: a mask, if there is one, is of the new tokens."""
        self._seen(self.is_real)
        return self._step()

    def _seen(self, mask: ir.Value) -> None:
        """Give the file its mask and positions."""
        if MASK in self.inputs:
            self._become(MASK, mask)
        for name in (one for one in (POSITIONS, PLACES) if one in self.inputs):
            places = self._op("Min", self.places, self._ints([self.max_tokens - 1]))
            self._become(name, places if name == POSITIONS else self._op("Reshape", places, self._ints([self.count])))

    def _become(self, name: str, value: ir.Value) -> None:
        """Compute an input of the file, of whatever type that is."""
        given = self.inputs[name]
        assert given.dtype is not None
        cast = self._op("Cast", value, to=given.dtype.value)
        ir.convenience.replace_all_uses_with(given, cast)
        self.graph.inputs.remove(given)

    def _keep(self, name: str, present: str) -> None:
        """Make a state of a recurrent one."""
        past, made = self.inputs[name], self.outputs[present]
        shape = static_shape(past)
        assert shape is not None
        assert past.dtype is not None
        if static_shape(made) != shape:
            raise UnsupportedModelError(f"output {present}", f"it is {made.shape}, and its past {past.shape}", _FIX)
        readers = list(past.uses())
        empty = self._constant(np.zeros((), past.dtype.numpy()))
        begun = self._op("Where", self._of_sequences(self.length, len(shape)), past, empty)
        for reader, place in readers:
            reader.replace_input_with(place, begun)
        self.states[self._op("Where", self._of_sequences(self.counts, len(shape)), made, past, before=None)] = past
        past.name = f"{RECURRENT}{name}"

    def _of_sequences(self, numbers: ir.Value, rank: int) -> ir.Value:
        """Which of the numbers [batch] are above 0, with as many dimensions as a state."""
        return self._op("Reshape", self._op("Less", self._ints([0]), numbers), self._ints([self.batch, *[1] * (rank - 1)]))

    def _write(self, past: ir.Value, new: ir.Value, index: ir.Value, before: ir.Node | None) -> ir.Value:
        """The past with rows of new tokens [batch, heads, count, width] at places [batch, count]."""
        shape = static_shape(new)
        assert shape is not None
        column = self._op("Reshape", index, self._ints([self.batch, 1, self.count, 1]))
        spread = self._op("Expand", column, self._ints(shape))
        return self._op("ScatterElements", past, spread, new, before=before, axis=_ROWS_AXIS)

    def _step(self) -> Step:
        """The model with the inputs, outputs and states of a step."""
        logits = self._last(self.outputs[self.decoder.logits])
        length = self._op("Add", self.length, self.counts)
        self.inputs[TOKENS].name = "tokens"
        for name, present in self.decoder.recurrent.items():
            self._keep(name, present)
        self.states = {length: self.length, **self.states}
        caches = [self.inputs[name] for name in (*self.decoder.caches, *self.decoder.recurrent)]
        self.graph.inputs[:] = [self.inputs[TOKENS], self.counts, self.length, *caches]
        self.graph.outputs[:] = [logits, *self.states]
        for renewed, state in self.states.items():
            renewed.name = fresh_name(self.model, f"{state.name}.new")
        logits.name = fresh_name(self.model, "logits")
        return Step(self.model, {str(renewed.name): str(state.name) for renewed, state in self.states.items()})

    def _last(self, logits: ir.Value) -> ir.Value:
        """Logits float32 [batch, vocabulary] of each last real token."""
        (*_, vocabulary) = shape = static_shape(logits) or (0,)
        if shape[:-1] != (self.batch, self.count):
            what = f"it is {list(shape)} for {self.count} tokens of {self.batch} sequences"
            raise UnsupportedModelError(f"output {self.decoder.logits}", what, "export the logits of all tokens")
        if self.count > 1:
            last = self._op("Max", self._op("Sub", self.counts, self._ints([1])), self._ints([0]))
            index = self._op("Reshape", last, self._ints([self.batch, 1, 1]))
            multiplied = multiply_last_row(self.model, logits, index)
            if not multiplied:
                spread = self._op("Expand", index, self._ints([self.batch, 1, vocabulary]))
                logits = self._op("GatherElements", logits, spread, before=None, axis=1)
        rows = self._op("Reshape", logits, self._ints([self.batch, vocabulary]), before=None)
        return self._op("Cast", rows, before=None, to=ir.DataType.FLOAT.value)

    def _input(self, name: str) -> ir.Value:
        return ir.Value(name=fresh_name(self.model, name), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([self.batch]))

    def _column(self, value: ir.Value) -> ir.Value:
        return self._op("Reshape", value, self._ints([self.batch, 1]))

    def _ints(self, numbers: Sequence[int]) -> ir.Value:
        return self._constant(np.array(numbers, np.int64))

    def _constant(self, array: np.ndarray) -> ir.Value:
        return add_constant(self.model, array, "of_step")

    def _op(self, op_type: str, *inputs: ir.Value, before: ir.Node | str | None = "first", **attributes: int) -> ir.Value:
        """A new node before another one, by default before all of the file; None: at the end."""
        node = operation(op_type, inputs, **attributes)
        node.outputs[0].name = fresh_name(self.model, f"step.{op_type.lower()}")
        place = self.first if before == "first" else before
        if isinstance(place, ir.Node):
            self.graph.insert_before(place, node)
        else:
            self.graph.append(node)
        infer_node(node, self.model)
        return node.outputs[0]
