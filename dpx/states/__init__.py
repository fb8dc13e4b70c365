"""What a state has paid for. `record`: the counts and checks of every release. `reading`: the same, read for a bill."""
