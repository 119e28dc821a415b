// Package sim tests the control plane by simulation with injected faults. There are two simulations, called ring (a)
// and ring (b). This package has the tests of both and their common types: Trace, the log of a run, and Violation, the
// error of a run in which a guarantee was violated.
//
//   - Ring (a), package steps: packages consensus, mvcc and store of three members, driven by one goroutine, on memory
//     file systems that simulate crashes. raft's random numbers come from the seed. The same seed gives exactly the
//     same run.
//   - Ring (b), package live: the services of three members, run by the production code, simulated hosts and agents,
//     and tenants, on the virtual time of testing/synctest. The same seed gives the same faults at the same times, but
//     the goroutines may be scheduled differently.
//
// # To run
//
//	go test ./controlplane/sim                                   both rings: 1,000 schedules of (a), 20 seconds of (b)
//	TRIVET_SIM_SEEDS=20000 go test … -run RingA -timeout 0       more of ring (a)
//	TRIVET_SIM_SECONDS=3600 go test … -run RingB -timeout 0      more of ring (b)
//	go test -tags mutant ./controlplane/sim -run Mutants         that broken rules are caught
//
// With -v each ring prints how many seeds it ran and how often each kind of event happened. With -race ring (a) runs
// fewer seeds.
//
// # To replay
//
// A failure prints its seed, the last lines of its trace, and the command to repeat the run:
//
//	TRIVET_SIM_SEED=17 TRIVET_SIM_TRACE=trace.txt go test ./controlplane/sim -run '^TestRingA$' -v
//
// It runs only that seed and writes the whole trace. In ring (a) the run is identical, so you can add print statements.
// In ring (b) the faults are the same, but the run may succeed: repeat it, and keep the first trace (TRIVET_SIM_TRACE
// also receives the trace of any seed that fails).
//
// # To read a trace
//
// A line begins with the step (a) or the virtual second (b). The line with BROKEN is where the violation was detected,
// which may be long after it happened. Examples of ring (a):
//
//	2>3 1 MsgApp t4 after 17/3: 2 entries, commit 17 5d1c09aa     an envelope: from, to, group, message, checksum
//	2 applies 18/4 9f04c2d1 77aa01ff: 1012…                       member, index/term, proposal ID, data checksum: result
//	2 shows revision 12: 1 count/0 7/12/3 was 9 =01a4… ; …        watch event: type, key, create/mod/version, value
//	client 3 begins 3.14-transfer on 2                            a line "ends" follows, with a revision or an error
//
// A trace of ring (b) has the commits of VM records (`commit 107: VM … STOPPING -> STOPPED, generation 8, wish …`), the
// actions of hosts (`h1 launches …`), the responses to tenants (`t2-9 stop … : <nil>`), faults, and the members' logs.
package sim

// Environment variables that configure the tests.
const (
	SeedsVariable   = "TRIVET_SIM_SEEDS"   // number of seeds that ring (a) runs
	SeedVariable    = "TRIVET_SIM_SEED"    // first seed of either ring; the only one unless a number or time is set
	SecondsVariable = "TRIVET_SIM_SECONDS" // how many seconds ring (b) continues to start further seeds
	TraceVariable   = "TRIVET_SIM_TRACE"   // path of the file for the whole trace of a failed run, or of a single seed
)
