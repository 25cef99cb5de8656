"""The paper's tables and figures, and studies of the simulator's own."""
