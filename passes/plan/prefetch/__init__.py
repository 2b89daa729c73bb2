"""Which objects are inside a small fast memory when, and which copies move them: integrated prefetching and caching.

| file | what |
|---|---|
| `problem.py` | steps, objects, the limit, the memories outside |
| `schedule.py` | copies, and what each waits for |
| `scheduler.py` | the algorithm: from a problem to a schedule |
| `simulation.py` | its rules, in simulated time; `window.py` is what they see of the future, `events.py` what comes of it |
| `integer_program.py` | schedules of few objects, decided for all steps at once |
| `residents.py` | what never leaves |
| `overflow.py` | what goes to a second tier |
| `handover.py` | what each copy waits for, so that no timing breaks the limit |
| `replay.py` | whether a schedule is right, and how long it takes; `timeline.py` is when what happens |
| `bounds.py` | how long any schedule takes at least, and the smallest limit |
"""
