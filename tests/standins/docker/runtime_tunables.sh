#!/bin/bash
echo "the machine's tunables are set"
