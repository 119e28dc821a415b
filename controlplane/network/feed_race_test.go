//go:build race

package network

// fanOutPorts is the number of ports in TestFeedFanOut.
const fanOutPorts = 1_000
