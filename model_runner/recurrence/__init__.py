"""Recurrent layers over rows and pages: gated delta nets, KDA, Mamba, Mamba 2, lightning attention, convolutions."""
