package uplink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

const (
	// reportAllInterval is the interval at which all observations are sent again, changed or not.
	reportAllInterval = 30 * time.Second
	// reportBatch is the maximum number of observations in one message. reportBytes is their total size in bytes at
	// which a message is complete; the last observation may exceed it. A member accepts at most 1,000 observations and
	// 1 MiB in one message.
	reportBatch = 100
	reportBytes = 256 << 10
	// reportErrorBytes is the maximum number of bytes of an error text that are sent. A member stores only 1 KiB of
	// them.
	reportErrorBytes = 4 << 10
)

var errReportsEnded = errors.New("the member ended the stream of reports")

// observations holds the newest observation and resource usage of each VM, and the set of VMs whose observation must
// still be sent.
type observations struct {
	wake chan struct{} // capacity 1

	mu      sync.Mutex // guards the fields below
	current map[cloud.VMID]cloud.Observation
	usage   map[cloud.VMID]cloud.Usage
	pending map[cloud.VMID]bool
}

func newObservations() *observations {
	return &observations{
		wake: make(chan struct{}, 1), current: map[cloud.VMID]cloud.Observation{}, usage: map[cloud.VMID]cloud.Usage{},
		pending: map[cloud.VMID]bool{},
	}
}

func (l *observations) observe(o cloud.Observation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if had, ok := l.current[o.VM]; ok && reflect.DeepEqual(had, o) {
		return
	}
	l.current[o.VM] = o
	if o.PID == 0 {
		delete(l.usage, o.VM)
	}
	l.queue(o.VM)
}

func (l *observations) measure(figures map[cloud.VMID]cloud.Usage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, u := range figures {
		if _, ok := l.current[id]; ok {
			l.usage[id] = u
			l.queue(id)
		}
	}
}

func (l *observations) forget(id cloud.VMID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.current, id)
	delete(l.usage, id)
	delete(l.pending, id)
}

func (l *observations) queueAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.current {
		l.queue(id)
	}
}

// queue marks a VM so that its observation is in one of the next messages. The caller must hold mu.
func (l *observations) queue(id cloud.VMID) {
	l.pending[id] = true
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// nextBatch returns the observations for the next message and removes their VMs from the queue. It returns nil if the
// queue is empty.
func (l *observations) nextBatch() []*agentv1.VmObservation {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := slices.Sorted(maps.Keys(l.pending))
	var out []*agentv1.VmObservation
	size := 0
	for _, id := range ids[:min(len(ids), reportBatch)] {
		if size >= reportBytes {
			break
		}
		o := l.current[id]
		o.LastError = strings.ToValidUTF8(o.LastError[:min(len(o.LastError), reportErrorBytes)], "")
		if u, ok := l.usage[id]; ok {
			o.Usage = &u
		}
		m := convert.Observation(o)
		out = append(out, m)
		size += proto.Size(m)
		delete(l.pending, id)
	}
	return out
}

// report sends Options.Facts and all observations, and then each observation that changes, until ctx or the stream
// ends. It sends changed facts with the next repetition of all observations.
func (l *Link) report(ctx context.Context, agent agentv1.AgentServiceClient) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := agent.Report(ctx)
	if err != nil {
		cancel()
		return fmt.Errorf("report: %w", err)
	}
	// When the member ends the stream, a waiting RecvMsg returns at once, with the status of the stream. Send would
	// return an error only later, so RecvMsg waits in a goroutine.
	var why error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		why = stream.RecvMsg(new(agentv1.ReportResponse))
	}()
	defer func() { cancel(); <-ended }()
	send := func(m *agentv1.ReportRequest) error {
		err := stream.Send(m)
		if errors.Is(err, io.EOF) {
			<-ended
			return reportsEnded(why)
		}
		return err
	}
	facts := l.o.Facts()
	if err := send(&agentv1.ReportRequest{Facts: facts}); err != nil {
		return err
	}
	l.observations.queueAll()
	l.volumes.queueAll()
	again := time.NewTicker(reportAllInterval)
	defer again.Stop()
	for {
		for batch := l.observations.nextBatch(); batch != nil; batch = l.observations.nextBatch() {
			if err := send(&agentv1.ReportRequest{Vms: batch}); err != nil {
				return err
			}
		}
		for batch := l.volumes.nextBatch(); batch != nil; batch = l.volumes.nextBatch() {
			if err := send(&agentv1.ReportRequest{Volumes: batch}); err != nil {
				return err
			}
		}
		select {
		case <-l.observations.wake:
		case <-again.C:
			l.observations.queueAll()
			l.volumes.queueAll()
			if now := l.o.Facts(); !proto.Equal(now, facts) {
				facts = now
				if err := send(&agentv1.ReportRequest{Facts: facts}); err != nil {
					return err
				}
			}
		case <-ended:
			return reportsEnded(why)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func reportsEnded(why error) error {
	if why == nil || errors.Is(why, io.EOF) {
		return errReportsEnded
	}
	return fmt.Errorf("report: %w", why)
}
