//go:build !race

package main

// raceEnabled reports whether the race detector is on. The race detector changes the number of allocations.
const raceEnabled = false
