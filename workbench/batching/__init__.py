"""The scheduler core: pure state machines with the time as an argument; no torch, no threads, no clock."""
