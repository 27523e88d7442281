#!/bin/bash
sed "s/.*/$GREETING &!/" names.txt > hello.txt
