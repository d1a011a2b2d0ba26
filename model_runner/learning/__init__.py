"""Online training of draft heads in a separate process (online speculative decoding, arXiv:2310.07177).

Everything that the target computes for requests is training data for the heads that draft its next tokens. Every draft
is verified, so heads can change at any time without changing an answer.

    engine process                                     learner process (runs only when the processor is idle)
    runner, Recorder  --- Begin, Example, ... ------->  Ring -> Learner: tests on each piece, then trains on it
    proposer          <-- NewHeads, LearningStats ----  publishes heads that are clearly better; Store: cache folder

In the engine, `recorder` collects training data, `link` connects to the learner and defines the messages, the runner
calls `learning`, and `wiring` creates all of these. In the learner, `process` is the main loop, `learner` trains and
decides which heads are better, `vocabulary` adapts the draft vocabulary, and `store` keeps heads across restarts.
`plan` divides the memory.
"""
