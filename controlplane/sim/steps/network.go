package steps

import (
	"fmt"
	"hash/crc32"
	"slices"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/sim"
)

// network carries encoded envelopes between the members. It delays, reorders, repeats and drops them.
type network struct {
	w       *world
	packets []packet
	cut     [members + 1][members + 1]bool // whether packets are dropped, by ID of the sender and the receiver
	healAt  int                            // step in which all partitions end
}

type packet struct {
	at  int    // step in which the packet arrives
	b   []byte // encoded envelope
	to  uint64
	dir string // directory of a snapshot's files on the sender's disk; empty: not a snapshot
	// sender and life identify the process that sent the packet: the member, and the value of member.life. A snapshot
	// is lost when that process ends. ReportSnapshot is called only on that process.
	sender *member
	life   int
}

// carry sends an envelope of the member m. It decides when the envelope arrives, and whether it is lost or repeated. If
// the envelope is a snapshot, dir is the directory of its files; otherwise dir is empty.
func (n *network) carry(m *member, e message.Envelope, dir string) {
	w := n.w
	if m.dying() {
		return
	}
	b, err := e.AppendTo(nil)
	if err != nil {
		w.fail("member %d sends what cannot be encoded: %v", m.id, err)
		return
	}
	w.check.sent(m, &e)
	p := packet{at: w.step, b: b, to: e.To, dir: dir, sender: m, life: m.life}
	if w.faults.late > 0 {
		p.at += w.rng.IntN(w.faults.late + 1)
	}
	if w.faults.stray > 0 && w.rng.IntN(w.faults.stray) == 0 {
		p.at += w.rng.IntN(80)
		w.count("packets delayed for long")
	}
	fate := ""
	switch chance := w.rng.IntN(100); {
	case dir != "":
		p.at += w.rng.IntN(20) // the transfer of files takes longer
	case chance < w.faults.loss:
		fate = " lost"
		w.count("packets lost")
	case chance < w.faults.loss+w.faults.twice:
		fate = " twice"
		w.count("packets repeated")
	}
	w.trace.Add("%d>%d %s%s", e.From, e.To, describe(&e, b), fate)
	if fate != " lost" {
		n.packets = append(n.packets, p)
	}
	if fate == " twice" {
		p.at += w.rng.IntN(10)
		n.packets = append(n.packets, p)
	}
}

// deliver delivers the packets that are due, in random order.
func (n *network) deliver() {
	w := n.w
	var due []packet
	n.packets = slices.DeleteFunc(n.packets, func(p packet) bool {
		if p.at <= w.step && !w.member(p.to).frozen() {
			due = append(due, p)
			return true
		}
		return false
	})
	w.rng.Shuffle(len(due), func(i, j int) { due[i], due[j] = due[j], due[i] })
	for _, p := range due {
		n.hand(p)
	}
}

func (n *network) hand(p packet) {
	to := n.w.member(p.to)
	e, err := message.Parse(p.b)
	if err != nil {
		n.w.fail("an envelope of member %d cannot be read: %v", p.sender.id, err)
		return
	}
	reached := to.up && !n.cut[p.sender.id][p.to]
	if p.dir == "" {
		if reached {
			_ = to.host.Step(e) // checkRunning checks Host.Err
			to.checkRunning()
		}
		return
	}
	there := p.sender.up && p.sender.life == p.life
	reached = reached && there
	n.w.trace.Add("%d>%d snapshot arrives: %v", p.sender.id, p.to, reached)
	if reached {
		to.arrivals++
		dir := to.fs.PathJoin(to.host.SnapshotDir(), "in-"+itoa(to.arrivals))
		if err := sim.CopyFiles(p.sender.fs, p.dir, to.fs, dir); err != nil {
			n.w.fail("copy a snapshot from member %d: %v", p.sender.id, err)
			return
		}
		_ = to.host.StepSnapshot(e, dir) // checkRunning checks Host.Err
		to.checkRunning()
		n.w.count("snapshots sent")
	}
	if there {
		_ = p.sender.host.ReportSnapshot(e.Group, e.To, reached) // checkRunning checks Host.Err
	}
}

// describe returns a line of the trace about the envelope e, whose encoding is b.
func describe(e *message.Envelope, b []byte) string {
	sum := crc32.ChecksumIEEE(b)
	switch e.Kind {
	case message.KindDirIDRequest:
		return fmt.Sprintf("birth? claim=%v %08x", e.Claim, sum)
	case message.KindDirIDResponse:
		return fmt.Sprintf("birth! claim=%v known=%v %08x", e.Claim, e.Known != 0, sum)
	}
	m := e.Raft
	switch {
	case e.Kind == message.KindHeartbeats:
		return fmt.Sprintf("beats %+v %08x", e.Heartbeats, sum)
	case e.Kind == message.KindRemoved:
		return fmt.Sprintf("%d removed %08x", e.Group, sum)
	case e.Kind == message.KindForward:
		return fmt.Sprintf("%d forwards %d in t%d, number %d %08x", e.Group, len(e.Payloads), e.Term, e.Number, sum)
	case e.Kind == message.KindRefuse:
		return fmt.Sprintf("%d refuses number %d in t%d: %d %08x", e.Group, e.Number, e.Term, e.Refusal, sum)
	}
	switch m.GetType() {
	case raftpb.MsgApp:
		return fmt.Sprintf("%d %s t%d after %d/%d: %d entries, commit %d %08x", e.Group, m.GetType(), m.GetTerm(), m.GetIndex(), m.GetLogTerm(), len(m.Entries), m.GetCommit(), sum)
	case raftpb.MsgSnap:
		return fmt.Sprintf("%d %s t%d at %d %08x", e.Group, m.GetType(), m.GetTerm(), m.GetSnapshot().GetMetadata().GetIndex(), sum)
	}
	return fmt.Sprintf("%d %s t%d i%d reject=%v %08x", e.Group, m.GetType(), m.GetTerm(), m.GetIndex(), m.GetReject(), sum)
}
