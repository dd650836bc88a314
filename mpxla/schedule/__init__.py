"""Pipeline schedules as plain data: one list of actions per rank, made and proved before it runs.

    action.py     what an action is, and its text
    placement.py  which rank runs which stage
    generate.py   integers -> forwards and backwards of every rank
    patterns.py   the orders among them that are known to be best
    custom.py     a user's own schedule as text
    lower.py      passes: add transfers, add reductions, take some microbatches
    simulate.py   dry run with costs: proves a schedule and predicts its timeline
    timeline.py   when everything ran, bubbles and peaks
    render.py     timeline -> text or Chrome trace

What these stand on: dataflow.py (what reads what), validate.py (checks of one list at a time) and
grid.py (the picture in an error).

The same lists are executed, drawn and profiled. Nothing here knows torch, processes, transports or
what a stage computes. Import the module that defines a name: nothing is re-exported here.
"""
