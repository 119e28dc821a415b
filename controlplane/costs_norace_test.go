//go:build !race

package main

// raceEnabled reports whether the race detector is on, which changes how much is allocated.
const raceEnabled = false
