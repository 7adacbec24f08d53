"""Pipeline parallelism: a schedule is a table of actions; small readers run it, simulate it and draw it."""
