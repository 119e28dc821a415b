package live

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/sim"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// mesh carries commands, consensus messages and image files from one process to the other members. It implements
// consensus.Transport, leader.Caller and image.Peers.
type mesh struct{ p *process }

const (
	// reachTime is the maximum time that a call waits for a connection to another member.
	reachTime = time.Second
	// maxCall is the maximum duration of a command on the called member. A caller that gives up while the network is
	// cut cannot cancel the command, so without a limit the command could wait forever.
	maxCall = time.Minute
)

// Send implements consensus.Transport. The envelope arrives after the network delay, or is lost if the network is cut.
func (m *mesh) Send(e message.Envelope) {
	f, from := m.p.s.f, m.p.s.name
	to := f.slot(e.To)
	b, err := e.AppendTo(nil)
	if err != nil || m.p.gone() {
		return
	}
	time.AfterFunc(f.net.delay(), func() {
		if open, _ := f.net.open(from, to.name); !open {
			return
		}
		if p := to.current(); p != nil && !p.gone() {
			if e, err := message.Parse(b); err == nil {
				p.runner.Deliver(e)
			}
		}
	})
}

// SendSnapshot implements consensus.Transport. It copies the files to the other member's disk in the background.
func (m *mesh) SendSnapshot(e message.Envelope, dir string) {
	m.p.s.f.behind.Go(func() {
		err := m.sendSnapshot(e, dir)
		m.p.s.f.trace.Add("%s sends a snapshot to m%d: %v", m.p.s.name, e.To, err)
		m.p.s.f.count("snapshots")
		m.p.runner.ReportSnapshot(e.Group, e.To, err == nil)
	})
}

func (m *mesh) sendSnapshot(e message.Envelope, dir string) error {
	f, from := m.p.s.f, m.p.s
	to := f.slot(e.To)
	b, err := e.AppendTo(nil)
	if err != nil {
		return err
	}
	// Hold the sending process here, and the receiving one below, so that neither ends while the files are copied.
	ctx, leave := m.p.enter(context.Background())
	if leave == nil {
		return errLost
	}
	defer leave()
	if err := f.net.pass(ctx, from.name, to.name); err != nil {
		return err
	}
	p := to.current()
	if p == nil {
		return errNoRoute
	}
	_, left := p.enter(ctx)
	if left == nil {
		return errNoRoute
	}
	defer left()
	into := to.disk.PathJoin(p.runner.SnapshotDir(), "in-"+itoa(f.number()))
	if err := sim.CopyFiles(from.disk, dir, to.disk, into); err != nil {
		return err
	}
	copied, err := message.Parse(b)
	if err != nil {
		return err
	}
	return p.runner.DeliverSnapshot(copied, into)
}

// Call implements leader.Caller. It executes a command on another member after the network delay, and returns its
// response.
func (m *mesh) Call(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error) {
	f, from := m.p.s.f, m.p.s.name
	to := f.slot(member)
	if f.net.until(ctx, from, to.name, reachTime) != nil || f.net.until(ctx, to.name, from, reachTime) != nil {
		return nil, fmt.Errorf("%s: %w", to.name, leader.ErrNotSent)
	}
	p := to.current()
	if p == nil || p.gone() {
		return nil, fmt.Errorf("%s: %w", to.name, leader.ErrNotSent)
	}
	if err := f.net.pass(ctx, from, to.name); err != nil {
		return nil, err
	}
	inside, leave := p.enter(context.WithoutCancel(ctx))
	if leave == nil {
		return nil, errLost
	}
	inside, cancel := context.WithTimeout(inside, maxCall)
	type answer struct {
		body []byte
		err  error
	}
	answered := make(chan answer, 1)
	go func() {
		defer leave()
		defer cancel()
		b, err := p.commands.Serve(inside, command, body, caller)
		answered <- answer{b, err}
	}()
	var a answer
	select {
	case a = <-answered:
	case <-ctx.Done():
		if open, _ := f.net.open(from, to.name); open {
			cancel() // the command is notified only if the network is up
		}
		return nil, ctx.Err()
	}
	if p.gone() {
		return nil, errLost
	}
	if err := f.net.pass(ctx, to.name, from); err != nil {
		return nil, err
	}
	return a.body, convertError(a.err)
}

// convertError converts an error that the called member returned to the error that the calling member gets over the
// network.
func convertError(err error) error {
	f, ok := fault.From(err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, leader.ErrNotLeader):
		return leader.ErrNotLeader
	case ok:
		sent := *f
		return sent.Because(nil)
	}
	return &leader.RemoteError{Text: err.Error()}
}

// Open implements leader.Caller. It returns an error, because streams are not simulated.
func (m *mesh) Open(_ context.Context, member uint64, command string, _ []byte, _ *cloud.Caller, _ func([]byte) error) error {
	return fmt.Errorf("%s on member %d: streams are not simulated", command, member)
}

// Exchange implements leader.Caller. It returns an error, because exchanges are not simulated.
func (m *mesh) Exchange(_ context.Context, member uint64, command string, _ []byte, _ *cloud.Caller, _ leader.Pipe) error {
	return fmt.Errorf("%s on member %d: exchanges are not simulated", command, member)
}

// ReadImage implements image.Peers. It returns the content of an image file on another member, from the byte position
// offset to the end.
func (m *mesh) ReadImage(ctx context.Context, member uint64, sha256 string, offset uint64) (io.ReadCloser, error) {
	f, from := m.p.s.f, m.p.s.name
	to := f.slot(member)
	if err := f.net.pass(ctx, from, to.name); err != nil {
		return nil, err
	}
	p := to.current()
	if p == nil || p.gone() {
		return nil, errNoRoute
	}
	file, err := p.files.Open(sha256)
	if err != nil {
		return nil, convertError(err)
	}
	defer file.Close()
	if _, err := file.Seek(int64(offset), io.SeekStart); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(file)
	if err != nil {
		return nil, err
	}
	if err := f.net.pass(ctx, to.name, from); err != nil {
		return nil, err
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

// StorePart implements image.Peers. It stores a part of an image upload on another member.
func (m *mesh) StorePart(ctx context.Context, member uint64, sha256 string, part []byte) error {
	f, from := m.p.s.f, m.p.s.name
	to := f.slot(member)
	if err := f.net.pass(ctx, from, to.name); err != nil {
		return err
	}
	p := to.current()
	if p == nil || p.gone() {
		return errNoRoute
	}
	if err := p.files.StorePart(ctx, sha256, bytes.NewReader(part)); err != nil {
		return convertError(err)
	}
	return f.net.pass(ctx, to.name, from)
}
