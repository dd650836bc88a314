"""Communication between ranks: tensors, objects, and the news that a rank has failed.

    transport.py   the protocol that the rest of mpxla talks to
    host.py        several processes, host memory, gloo
    loopback.py    a world of one process
    xla.py         collectives inside XLA programs: mesh.py (replica groups), xla_programs.py (the
                   programs), xla_queue.py (their order; the device's backend runs them)
    objects.py     objects on top of any transport, each message with its seal (seal.py)
    codec.py       what mpxla says to itself as data, which runs no code where it is read
    secret.py      the key that all ranks of a session share; handshake.py proves it on connections
    addresses.py   where sockets listen; store.py: where processes find each other at first
    worker.py      a thread for what must not keep the caller waiting
    lifeline.py    who is alive, and stall.py: what all are doing when nothing moves

Nothing here knows stages, schedules, configuration or the session.
"""
