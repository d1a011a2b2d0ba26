"""Recurrent layers over rows and pages: gated delta nets, KDA, Mamba 2, lightning attention, causal convolutions."""
