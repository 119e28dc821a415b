// Package sim proves the control plane by simulation, in two rings. Its tests are the proof; this package holds what both
// rings share: the trace of a run, and the violation that ends one.
//
//   - Ring (a), package steps: consensus, mvcc and store of three members, stepped by one goroutine on crashable memory
//     file systems, with raft's chance drawn from the seed. A seed replays byte for byte.
//   - Ring (b), package live: the trio's services over three members with their real runners, simulated hosts and agents,
//     and tenants, on the virtual time of testing/synctest. A seed replays what happens to whom and when, not how
//     goroutines take turns.
//
// # To run
//
//	go test ./controlplane/sim                                   both rings: 1,000 schedules of (a), 20 seconds of (b)
//	TRIVET_SIM_SEEDS=20000 go test … -run RingA -timeout 0       more of ring (a)
//	TRIVET_SIM_SECONDS=3600 go test … -run RingB -timeout 0      more of ring (b)
//	go test -tags mutant ./controlplane/sim -run Mutants         that broken rules are caught
//
// With -v each ring tells how many seeds it ran and how often everything happened. With -race ring (a) runs fewer.
//
// # To replay
//
// A failure names its seed, the last lines of its trace, and the command:
//
//	TRIVET_SIM_SEED=17 TRIVET_SIM_TRACE=trace.txt go test ./controlplane/sim -run '^TestRingA$' -v
//
// runs that seed alone and writes the whole trace. In ring (a) that is the same run again, so prints may be added where
// the trace is silent. In ring (b) it has the same faults at the same times and may go well: run it some more times, and
// keep the first trace (TRIVET_SIM_TRACE also gets the trace of whatever seed fails).
//
// # To read a trace
//
// A line begins with the step (a) or the virtual second (b); the line that says BROKEN is where the promise was seen
// broken, which may be long after it was. Of ring (a):
//
//	2>3 1 MsgApp t4 after 17/3: 2 entries, commit 17 5d1c09aa     an envelope: from, to, group, message, checksum
//	2 applies 18/4 9f04c2d1 77aa01ff: 1012…                       a member, the entry and its term, proposal, data: answer
//	2 shows revision 12: 1 count/0 7/12/3 was 9 =01a4… ; …        what a watch saw: type, key, create/mod/version, value
//	client 3 begins 3.14-transfer on 2                            and ends it with a revision or an error
//
// Of ring (b), every commit of a VM's record (`commit 107: VM … STOPPING -> STOPPED, generation 8, wish …`), what hosts do
// (`h1 launches …`), what tenants are told (`t2-9 stop … : <nil>`), faults, and the members' logs.
package sim

// What the environment says of a run.
const (
	SeedsVariable   = "TRIVET_SIM_SEEDS"   // how many schedules of ring (a)
	SeedVariable    = "TRIVET_SIM_SEED"    // the first seed of either ring; the only one unless a number or a time is given
	SecondsVariable = "TRIVET_SIM_SECONDS" // how long ring (b) goes on with further seeds
	TraceVariable   = "TRIVET_SIM_TRACE"   // the file that gets the whole trace of a failure, or of an only seed
)
