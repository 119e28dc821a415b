// Package nettest makes network namespaces for tests and observes them. [Namespaces] makes them and removes them at the
// end of the test. [Streams] finds packets that are lost, [Recorder] finds packets that must not arrive, and [Writes]
// finds changes of the kernel's network state. [CountPrograms] counts the programs that the tested code runs to change
// this state.
//
// # Decisions
//
//   - Namespaces are named as in ip-netns(8), so that the tested code and the programs of iproute2 find them.
//   - Lost packets are found by sequence numbers at the receiver and not by counters of devices, which also count
//     packets that no program receives.
//   - Writes are the kernel's own notifications, so that a test does not depend on the counts of the code that it
//     tests. The kernel announces no changes of ipsets and sysctls. It also announces bridge ports that did not change.
//     Tests compare the contents of these as well.
package nettest
