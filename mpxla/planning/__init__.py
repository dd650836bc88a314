"""Paper studies of training: step time and memory of a transformer on devices that nobody has yet.

    files.py        TOML files, checked key by key
    device.py       what a device and its links can do
    transformer.py  parameters and operations of a model
    layout.py       how a step is spread: stages x tensor x data, schedule, recomputation
    memory.py       bytes of parameters, optimizer state and activations
    work.py         seconds of the parts of a step
    predict.py      the step, by the simulator of schedules
    explore.py      the best layout for a number of devices

Models and devices that come with mpxla are the files in `models/` and `devices/`. Nothing here
knows torch, captured graphs or the runtime; a layout may use features that mpxla does not run yet,
and `layout.py` says which.
"""
