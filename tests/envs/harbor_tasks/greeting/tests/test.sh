#!/bin/bash
# A share of the lines as the reward, and their number as a metric. The exit code says nothing.
right=$(comm -12 <(sort hello.txt 2>/dev/null) <(sort /tests/expected.txt) | wc -l)
printf '{"reward": %s, "lines": %s}\n' "$(python3 -c "print($right / 3)")" "$right" > /logs/verifier/reward.json
exit 1
