package cloud

// Drain is the request to move all VMs that run on a host to other hosts, and its state. It is part of the record of
// the host, and is removed when the host is uncordoned.
type Drain struct {
	Phase DrainPhase
	// By is the name of the caller that requested the drain.
	By string
	// Force is true if VMs that cannot be moved are shut down.
	Force bool
	Began Time
	// Deadline is the time at which the drain ends even if VMs still run on the host.
	Deadline Time
	// Ended is the time at which the drain left the phase DrainMoving. It is 0 before that.
	Ended Time
	// Result says how the drain ended.
	Result string
}

// DrainPhase is the phase of a drain.
type DrainPhase uint8

const (
	// DrainMoving: VMs are being moved. The host is DRAINING.
	DrainMoving DrainPhase = 1 + iota
	// DrainEmpty: no VM ran on the host when the drain ended, and none is started there. The host is in MAINTENANCE.
	DrainEmpty
	// DrainIncomplete: the drain ended while VMs ran on the host. The host is CORDONED.
	DrainIncomplete
)

func (p DrainPhase) String() string {
	return [...]string{"UNSPECIFIED", "MOVING", "EMPTY", "INCOMPLETE"}[min(p, DrainIncomplete)]
}

// Default and maximum of the timeout of a drain, in seconds.
const (
	DefaultDrainSeconds = 3600
	MaxDrainSeconds     = 24 * 3600
)

// Draining reports whether VMs are being moved away from the host.
func (n *Node) Draining() bool { return n.Drain != nil && n.Drain.Phase == DrainMoving }

// InMaintenance reports whether a drain has emptied the host. No VM may be started on it then.
func (n *Node) InMaintenance() bool { return n.Drain != nil && n.Drain.Phase == DrainEmpty }

// EndDrain ends the drain of a host at the time now. The host must be Draining.
func (n *Node) EndDrain(to DrainPhase, result string, now Time) {
	d := *n.Drain
	d.Phase, d.Result, d.Ended = to, result, now
	n.Drain, n.UpdatedAt = &d, now
}
