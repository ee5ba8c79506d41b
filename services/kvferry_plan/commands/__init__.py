"""The command `kvferry plan`: reads its inputs, asks the planner, shows the answer."""
