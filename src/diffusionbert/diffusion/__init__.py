"""The mathematics: schedules, forward processes and their reverse steps, counter-based random numbers. Pure torch."""
