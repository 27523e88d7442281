#!/bin/bash
id -un | grep -qx judge || exit 1
sum=$(timeout 5 ./sum.sh "$LIMIT")
if [ "$sum" = 5050 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
