"""Draft heads that learn while they serve, in a process of their own (online speculative decoding, arXiv:2310.07177).

Whatever a request makes the target compute is training data for the heads that guess what it will say next, and since
every guess is verified, heads may change at any time without changing any answer. So:

    engine process                                     learner process (only what the processor has to spare)
    runner, Recorder  --- Begin, Piece, Piece, ... -->  Ring -> Learner: judges each piece first, then trains on it
    proposer          <-- NewHeads, LearnerReport ----  Publisher: what is clearly better; Store: the cache folder

`messages` is what crosses, `process` the loop, `ring` what is remembered, `learner` what trains, `trial` what decides
which heads are better, `store` what stays after a restart, `plan` how memory is divided.
"""
