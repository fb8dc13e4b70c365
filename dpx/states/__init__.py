"""The record of a run inside its state. `record`: counts and checks every release. `reading`: reads it for the cost."""
