"""What a state has paid for. `record`: the counts and checks of every release. `reading`: reads them for the cost."""
