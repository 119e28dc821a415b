package machine

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestPlan runs the scripts in testdata/plan on a simulated host. After a command it calls NextAction and simulates the
// action, until the action is Nothing. It prints each action with its report, then the last report and the time until
// the next observation. The commands are:
//
//   - `host` begins with a new host without a VM.
//   - `assign POWER starts= reboots= resets= grace=` sets the desired power state, counters and grace period of the VM;
//     `assign none` removes the desired state. With nics=(a,b:p) the VM has the network interfaces a and b; b has port p.
//     With volumes=(a,b:2) the VM has the volumes a and b; b has 2 bytes, and a has 1.
//   - `guest EVENT trouble=` changes the state of the guest: off, dies, paused, unresponsive, runs, waiting, orphan, or
//     drops DEVICE.
//   - `agent` restarts the agent. `fail STEP TEXT` makes the next action whose first word is STEP fail with the error
//     TEXT.
//   - `lease ends` and `lease renewed` change the host's lease. An assignment with lease is of a VM that must be off
//     without a lease.
//   - An assignment with source=N or target=N, and phase=PHASE, has the attempt N of a migration. `transfer EVENT` changes
//     the state of the transfer in QEMU. With rolled-back=N, the target of the attempt N never runs the guest.
//   - `cluster ID` moves the host to another cluster. `wait DURATION` advances the time.
func TestPlan(t *testing.T) {
	datadriven.Walk(t, "testdata/plan", func(t *testing.T, path string) {
		h := newPaper()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "host":
				h = newPaper()
				return ""
			case "assign":
				h.want = assignment(t, d)
			case "guest":
				h.happens(t, d)
			case "agent": // the agent is killed and started again
				h.restart()
			case "fail":
				h.fails[d.CmdArgs[0].Key] = d.CmdArgs[1].Key
				return ""
			case "lease":
				h.s.LeaseEnded = d.CmdArgs[0].Key == "ends"
			case "transfer":
				h.transferred(t, d)
			case "cluster":
				h.cluster, h.want = d.CmdArgs[0].Key, nil
			case "wait":
				h.pass(t, d)
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return h.settle(t)
		})
	})
}

func assignment(t *testing.T, d *datadriven.TestData) *agentv1.AssignedVm {
	powers := map[string]agentv1.Power{"on": agentv1.Power_POWER_ON, "off": agentv1.Power_POWER_OFF,
		"destroyed": agentv1.Power_POWER_DESTROYED, "orphaned": agentv1.Power_POWER_ORPHANED}
	power, ok := powers[d.CmdArgs[0].Key]
	if !ok {
		return nil
	}
	w := &agentv1.AssignedVm{Power: power, StopsWithLease: d.HasArg("lease")}
	d.MaybeScanArgs(t, "starts", &w.Starts)
	d.MaybeScanArgs(t, "reboots", &w.Reboots)
	d.MaybeScanArgs(t, "resets", &w.Resets)
	for _, arg := range d.CmdArgs {
		for _, text := range arg.Vals {
			if arg.Key != "volumes" {
				break
			}
			id, size, _ := strings.Cut(text, ":")
			v := &agentv1.AssignedVolume{VolumeId: id, SizeBytes: 1}
			_, _ = fmt.Sscan(size, &v.SizeBytes)
			w.Disks = append(w.Disks, &agentv1.AssignedDisk{Id: id, Volume: v})
		}
		if arg.Key != "nics" {
			continue
		}
		for _, text := range arg.Vals {
			id, port, _ := strings.Cut(text, ":")
			w.Nics = append(w.Nics, &agentv1.AssignedNic{Id: id, PortId: port})
		}
	}
	w.Migration = assignedMigration(t, d)
	d.MaybeScanArgs(t, "rolled-back", &w.RolledBackAttempt)
	var grace string
	if d.MaybeScanArgs(t, "grace", &grace) {
		g, err := time.ParseDuration(grace)
		require.NoError(t, err)
		w.StopGraceMs = uint64(g.Milliseconds())
	}
	return w
}

// paper simulates a host: it applies the effects of actions to an Observation.
type paper struct {
	want     *agentv1.AssignedVm
	cluster  string
	s        Observation
	fails    map[string]string
	launches int
	// sendsRunning means that the host sends the memory of guests while they run.
	sendsRunning bool
}

func newPaper() *paper {
	return &paper{cluster: "1", fails: map[string]string{}, s: Observation{OffFor: -1, PressedFor: -1, RebootFor: -1, PausedFor: -1}}
}

func (h *paper) happens(t *testing.T, d *datadriven.TestData) {
	d.MaybeScanArgs(t, "trouble", &h.s.Trouble)
	switch what := d.CmdArgs[0].Key; what {
	case "off":
		h.end(cloud.ExitGuest)
		if h.s.PressedFor >= 0 {
			h.s.Exit = cloud.ExitRequested
		}
	case "dies":
		h.end(cloud.ExitFailed)
	case "paused":
		h.s.Guest, h.s.Recoverable, h.s.PausedFor = Paused, d.HasArg("recoverable"), 0
	case "drops": // QEMU lost the device of an interface that it was asked to detach, for example in a reset
		for i := range h.s.NICs {
			h.s.NICs[i].Present = h.s.NICs[i].Present && h.s.NICs[i].ID != d.CmdArgs[1].Key
		}
		for i := range h.s.Volumes {
			h.s.Volumes[i].Present = h.s.Volumes[i].Present && h.s.Volumes[i].ID != d.CmdArgs[1].Key
		}
	case "unresponsive":
		h.s.Guest = Unresponsive
	case "runs":
		h.s.Guest, h.s.Trouble, h.s.PausedFor = Running, "", -1
	case "waiting":
		h.s.Guest = Waiting
	case "orphan":
		h.s.Guest, h.s.Exists = OrphanProcess, true
	default:
		d.Fatalf(t, "unknown event %q", what)
	}
}

func (h *paper) end(exit cloud.Exit) {
	h.s.Guest, h.s.Exit, h.s.NICs, h.s.LastNIC = None, exit, nil, ""
	h.s.Unreleased = len(h.s.Volumes) > 0
	h.s.Volumes, h.s.LastDisk = nil, ""
	h.s.Transfer = Transfer{}
	h.s.OffFor, h.s.PressedFor, h.s.RebootFor, h.s.PausedFor = -1, -1, -1, -1
}

// restart clears the fields that an agent does not store on disk, as a restart of the agent does.
func (h *paper) restart() {
	h.s.OffFor, h.s.PressedFor, h.s.RebootFor, h.s.PausedFor = -1, -1, -1, -1
	h.s.Error, h.s.Refused = "", false
	h.s.Transfer.Ending, h.s.Transfer.Memory = false, memory{}
	if h.s.Guest == Paused {
		h.s.PausedFor = 0
	}
}

func (h *paper) pass(t *testing.T, d *datadriven.TestData) {
	by, err := time.ParseDuration(d.CmdArgs[0].Key)
	require.NoError(t, err)
	for _, since := range []*time.Duration{&h.s.OffFor, &h.s.PressedFor, &h.s.RebootFor, &h.s.PausedFor, &h.s.Transfer.StalledFor, &h.s.Transfer.SwitchoverFor} {
		if *since >= 0 {
			*since += by
		}
	}
}

func (h *paper) settle(t *testing.T) string {
	var out []string
	for range 20 {
		if h.want.GetPower() == agentv1.Power_POWER_OFF && h.s.Guest != None && h.s.OffFor < 0 {
			h.s.OffFor = 0
		}
		if h.s.Record.rebooting() && h.s.RebootFor < 0 {
			h.s.RebootFor = 0
		}
		h.s.Foreign = h.s.Record.Cluster != "" && h.s.Record.Cluster != h.cluster
		p := NextAction(h.want, h.s)
		if p.Action == Nothing {
			return strings.Join(append(out, h.report(p)), "\n")
		}
		out = append(out, fmt.Sprintf("%-40s %s", strings.TrimSpace(p.Action.String()+" "+p.NIC+p.Disk), h.report(p)))
		if p.NIC != "" {
			h.s.LastNIC = p.NIC
		}
		if p.Disk != "" {
			h.s.LastDisk = p.Disk
		}
		if failure, ok := h.fails[strings.Fields(p.Action.String())[0]]; ok {
			delete(h.fails, strings.Fields(p.Action.String())[0])
			h.s.Error = failure
			h.s.Refused = failure == "refused"
			if p.Action == Start { // a failed start is recorded as ended
				h.s.Record.StartsDone = h.want.GetStarts()
				h.s.Record.End, h.s.Error = End{Exit: cloud.ExitFailed, Error: failure}, ""
			}
			if !h.s.Refused && p.Action != Start {
				return strings.Join(append(out, "failed: "+h.report(NextAction(h.want, h.s))), "\n")
			}
			continue
		}
		h.s.Error = ""
		h.doMigration(p)
		h.do(t, p.Action)
	}
	require.FailNow(t, "the actions do not end", strings.Join(out, "\n"))
	return ""
}

func (h *paper) do(t *testing.T, a Action) {
	r := &h.s.Record
	switch a {
	case Build:
		r.Built, r.Cluster, h.s.Exists = true, h.cluster, true
	case Start:
		h.launches++
		require.Greater(t, h.want.GetStarts(), r.StartsDone, "the plan executes a start again that is done")
		r.StartsDone, r.Live = h.want.GetStarts(), true
		r.RebootsBegun, r.RebootsDone, r.ResetsDone = h.want.GetReboots(), h.want.GetReboots(), h.want.GetResets()
		h.s.Guest, h.s.Trouble = Waiting, ""
	case Relaunch:
		r.RebootsDone = r.RebootsBegun
		h.s.Guest, h.s.Trouble = Waiting, ""
	case Resume, ResumeAfterDiskError:
		h.s.Guest, h.s.Trouble, h.s.PausedFor = Running, "", -1
	case PressPowerButton:
		h.s.PressedFor = 0
	case PowerOff:
		h.end(cloud.ExitRequested)
	case RecordExit:
		r.Live, r.End = false, End{Exit: h.s.Exit, Error: h.s.Trouble}
		h.s.Unreleased = false
	case Reset:
		r.ResetsDone = h.want.GetResets()
		h.s.Guest = Running
	case Reboot:
		r.RebootsBegun = h.want.GetReboots()
	case Restart:
		r.RebootsDone = r.RebootsBegun
		h.s.Guest, h.s.RebootFor, h.s.PressedFor = Running, -1, -1
	case AckStart:
		r.StartsDone = h.want.GetStarts()
	case AdoptCounters:
		*r = r.withCountersOf(h.cluster, h.want)
	case PlugNIC:
		for _, n := range nics(h.want) {
			if n.ID == h.s.LastNIC {
				h.dropNIC(n.ID)
				h.s.NICs = append(h.s.NICs, qemu.AttachedNIC{NIC: n, Present: true})
			}
		}
	case UnplugNIC:
		h.dropNIC(h.s.LastNIC)
	case PlugDisk, UnplugDisk, ResizeDisk:
		h.dropDisk(h.s.LastDisk)
		for _, d := range h.want.GetDisks() {
			if d.GetId() == h.s.LastDisk && a != UnplugDisk {
				h.addVolume(d)
			}
		}
	case RecordLeaseRule:
		r.StopsWithLease = h.want.GetStopsWithLease()
	case Destroy:
		h.s = newPaper().s
	}
	if a == Start || a == Relaunch {
		h.s.Unreleased, h.s.Volumes = false, nil
		for _, d := range h.want.GetDisks() {
			h.addVolume(d)
		}
		h.s.NICs = nil
		for _, n := range nics(h.want) {
			h.s.NICs = append(h.s.NICs, qemu.AttachedNIC{NIC: n, Present: true})
		}
	}
}

func (h *paper) dropNIC(id string) {
	h.s.NICs = slices.DeleteFunc(h.s.NICs, func(n qemu.AttachedNIC) bool { return n.ID == id })
}

func (h *paper) addVolume(d *agentv1.AssignedDisk) {
	h.s.Volumes = append(h.s.Volumes, qemu.AttachedDisk{
		Disk: qemu.Disk{ID: d.GetId(), Volume: d.GetVolume().GetVolumeId()}, Present: true, Size: d.GetVolume().GetSizeBytes(),
	})
}

func (h *paper) dropDisk(id string) {
	h.s.Volumes = slices.DeleteFunc(h.s.Volumes, func(d qemu.AttachedDisk) bool { return d.ID == id })
}

func (h *paper) report(p Plan) string {
	levels := map[cloud.Observed]string{cloud.ObservedAbsent: "ABSENT", cloud.ObservedBuilding: "BUILDING",
		cloud.ObservedBuilt: "BUILT", cloud.ObservedLaunching: "LAUNCHING", cloud.ObservedRunning: "RUNNING",
		cloud.ObservedStopping: "STOPPING", cloud.ObservedBuildFailed: "BUILD_FAILED", cloud.ObservedEnded: "ENDED"}
	exits := map[cloud.Exit]string{cloud.ExitGuest: " by the guest", cloud.ExitRequested: " as requested", cloud.ExitFailed: " in failure"}
	out := levels[p.Observed] + exits[p.Exit]
	if p.Error != "" {
		out += fmt.Sprintf(" %q", p.Error)
	}
	r := h.s.Record
	if r.RebootsDone+r.ResetsDone > 0 {
		out += fmt.Sprintf("  reboots=%d resets=%d", r.RebootsDone, r.ResetsDone)
	}
	if p.Migration != cloud.MigrationUnknown {
		out += "  migration " + p.Migration.String()
	}
	if p.Reason != "" {
		out += fmt.Sprintf(" %q", p.Reason)
	}
	if p.Wait > 0 {
		out += fmt.Sprintf("  again in %s", p.Wait)
	}
	return out
}

// TestRules checks these rules of NextAction for all combinations of desired state and observation: no action without
// desired state, Destroy only for DESTROYED, no launch while the VM has a process, no start twice, network interfaces
// and volumes change only while the guest runs, and a VM counts as stopped only when its volumes are flushed. As long
// as the record's counters belong to another cluster, no plan may end a guest whose VM or whose last start is missing
// from the data of the host's cluster.
func TestRules(t *testing.T) { require.Empty(t, violation()) }

// violation calls NextAction with every combination of desired state and observation. It returns a description of the
// first plan that breaks a rule, or "".
func violation() string {
	wants := []*agentv1.AssignedVm{nil, {}}
	for power := agentv1.Power_POWER_OFF; power <= agentv1.Power_POWER_ORPHANED; power++ {
		for _, n := range []uint64{0, 1, 2} {
			wants = append(wants, &agentv1.AssignedVm{Power: power, Starts: n, Reboots: n, Resets: n, StopGraceMs: n * 10_000,
				Nics: []*agentv1.AssignedNic{{Id: "new"}}, Disks: []*agentv1.AssignedDisk{{Id: "new", Volume: &agentv1.AssignedVolume{}}}})
		}
	}
	for _, want := range wants {
		for guest := None; guest <= OrphanProcess; guest++ {
			for bits := range 1 << 7 {
				for _, since := range []time.Duration{-1, 0, time.Minute} {
					s := Observation{Exists: bits&1 != 0 || guest != None, Refused: bits&2 != 0, Guest: guest, Recoverable: bits&4 != 0,
						OffFor: max(since, 0), PressedFor: since, RebootFor: since, PausedFor: since, Foreign: bits&32 != 0}
					s.NICs = []qemu.AttachedNIC{{NIC: qemu.NIC{ID: "old"}, Present: true}}
					s.Volumes = []qemu.AttachedDisk{{Disk: qemu.Disk{ID: "old"}, Present: true}}
					s.Unreleased = bits&64 != 0 && bits&16 != 0
					s.Record = Record{Built: bits&8 != 0, Live: bits&16 != 0, StartsDone: 1, RebootsBegun: uint64(bits >> 3 & 1)}
					if broken := rule(want, s, NextAction(want, s)); broken != "" {
						return fmt.Sprintf("%s: desired %v, observed %+v", broken, want, s)
					}
				}
			}
		}
	}
	return ""
}

func rule(want *agentv1.AssignedVm, s Observation, p Plan) string {
	launches := p.Action == Start || p.Action == Relaunch
	switch {
	case p.Observed == cloud.ObservedUnspecified:
		return "the plan reports no observed state"
	case want.GetPower() == agentv1.Power_POWER_UNSPECIFIED && p.Action != Nothing:
		return "an action without a desired state"
	case want.GetPower() != agentv1.Power_POWER_DESTROYED && p.Action == Destroy:
		return "Destroy without the desired state DESTROYED"
	case want.GetPower() != agentv1.Power_POWER_ON && (launches || p.Action == Resume || p.Action == ResumeAfterDiskError):
		return "a guest is launched or resumed without the desired state ON"
	case (p.Action == PlugNIC || p.Action == UnplugNIC) && (s.Guest != Running || want.GetPower() != agentv1.Power_POWER_ON):
		return "a network interface changes although the guest should not run, or cannot react"
	case (p.Action == PlugDisk || p.Action == UnplugDisk) && (s.Guest != Running || want.GetPower() != agentv1.Power_POWER_ON):
		return "a volume changes although the guest should not run, or cannot react"
	case s.Unreleased && s.Guest == None && s.Exists && (p.Observed == cloud.ObservedBuilt || p.Observed == cloud.ObservedEnded):
		return "a VM counts as stopped before its volumes are flushed"
	case launches && s.Guest != None:
		return "a launch while the VM has a process"
	case s.Foreign && s.Guest != None && want.GetPower() == agentv1.Power_POWER_ORPHANED && p.Action != Nothing:
		return "a guest whose VM is missing in this cluster's data is ended"
	case s.Foreign && s.Guest != None && want.GetPower() == agentv1.Power_POWER_OFF && s.Record.StartsDone > want.GetStarts() && p.Action != Nothing:
		return "a guest whose last start is missing in this cluster's data is ended"
	case s.Foreign && want.GetPower() <= agentv1.Power_POWER_ON && p.Action != Nothing && p.Action != AdoptCounters:
		return "counters of another cluster are used"
	case p.Action == Start && s.Record.StartsDone >= want.GetStarts():
		return "a start that is done is executed again"
	}
	return ""
}
