package cloud

// MaxMigrationMachine is the greatest length in bytes of MigrationObservation.Machine.
const MaxMigrationMachine = 64 << 10

// MigrationState is the state of a migration on one of its hosts. The numbers are those of agent.v1.MigrationState.
type MigrationState uint8

const (
	// MigrationUnknown is the state of a host that has reported nothing about the migration.
	MigrationUnknown MigrationState = iota
	// MigrationPrepared means that the source has described its QEMU, or that the target's QEMU waits for the state of
	// the guest.
	MigrationPrepared
	// MigrationTransferring means that the source sends disks and memory.
	MigrationTransferring
	// MigrationAtSwitchover means that the source has paused the guest, and has sent everything but the last part of the
	// guest's state. The source waits 3 seconds for the switchover, and then cancels the attempt.
	MigrationAtSwitchover
	// MigrationHandedOver means that the source has begun to send the last part of the guest's state. It does not run the
	// guest again without a rollback.
	MigrationHandedOver
	// MigrationReceived means that the target has the complete state of the guest, and has not continued the guest yet.
	MigrationReceived
	// MigrationRunning means that the guest runs at the target, or after a rollback at the source.
	MigrationRunning
	// MigrationCancelled means that the source never completes the attempt. The host has stored this decision on disk.
	MigrationCancelled
	// MigrationFailed means that the target has no QEMU of the attempt, never ran the guest and never will. The host has
	// stored this state on disk.
	MigrationFailed
)

func (s MigrationState) String() string {
	names := [...]string{"UNKNOWN", "PREPARED", "TRANSFERRING", "AT_SWITCHOVER", "HANDED_OVER", "RECEIVED", "RUNNING",
		"CANCELLED", "FAILED"}
	if int(s) < len(names) {
		return names[s]
	}
	return "INVALID"
}

// MigrationObservation is a host's report about a migration of a VM from or to the host.
type MigrationObservation struct {
	// Attempt identifies the attempt that the report is about.
	Attempt uint64
	State   MigrationState
	// Address is host:port at which the target waits for the source.
	Address string
	// Machine describes the running QEMU of the source, in a format of the agents. It has at most MaxMigrationMachine
	// bytes.
	Machine []byte
	// Error is why the attempt was cancelled or failed.
	Error string
	// TotalBytes and SentBytes are the number of bytes of disks and memory that the source must send and has sent.
	TotalBytes, SentBytes uint64
	// DowntimeMS is the time for which the guest was paused, in milliseconds. It is reported after the switchover.
	DowntimeMS uint32
	// MemoryChannels is, in the report of the source that has Machine, the number of connections, besides the main one, over
	// which its QEMU can send the memory.
	MemoryChannels uint32
}
