package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/ipsec"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/retry"
)

const (
	// encryptionResync is the time after which the kernel's state is compared with the keys although nothing changed.
	encryptionResync = 30 * time.Second
	// encryptionTimeout limits the time for one comparison and its changes.
	encryptionTimeout = time.Minute
)

// encryptionRetries are the pauses between attempts to set the keys.
var encryptionRetries = retry.Pauses{First: 200 * time.Millisecond, Last: 30 * time.Second, Jitter: 0.2}

// packetEncryption is the part of ipsec.IPsec that encryption uses.
type packetEncryption interface {
	Set(ctx context.Context, peers []cloud.EncryptedPeer) (writes []string, err error)
	Close()
}

// encryption sets the keys that the control plane sends to this host. It delays the acknowledgment of an update until
// the host can receive packets with the keys of the update, because the control plane begins the next rotation when it
// has the acknowledgments of all hosts.
type encryption struct {
	kernel packetEncryption
	ack    func(cloud.NetworkAck)
	log    *slog.Logger
	resync time.Duration
	wake   chan struct{} // capacity 1

	mu sync.Mutex // guards the fields below
	// peers are the peers of the newest update with keys. It is nil before the first such update.
	peers []cloud.EncryptedPeer
	// number counts the changes of peers, and applied is the number of the last change that the kernel has.
	number, applied uint64
	// stream and revision identify the newest update that has changed peers.
	stream   uint64
	revision int64
	// held is the newest acknowledgment that waits for the keys.
	held *cloud.NetworkAck
}

func newEncryption(kernel packetEncryption, ack func(cloud.NetworkAck), log *slog.Logger) *encryption {
	return &encryption{kernel: kernel, ack: ack, log: log, resync: encryptionResync, wake: make(chan struct{}, 1)}
}

// stopEncryption removes what an earlier process of the agent has made with network.encrypt: true.
func stopEncryption(ctx context.Context, log *slog.Logger) {
	writes, err := ipsec.Remove(ctx, "")
	if err != nil {
		log.Warn("cannot stop the encryption of traffic to other hosts", "err", err)
	}
	if len(writes) > 0 {
		log.Info("traffic to other hosts is no longer encrypted", "writes", writes)
	}
}

// openEncryption adds the encryption to the host's description, and returns what the host lacks for it. It makes the
// kernel drop VXLAN packets that are not encrypted, even if the host lacks a feature, because the host can have VPCs
// from before the setting was changed. States that an earlier process of the agent has made stay in force until the
// first update with keys.
func (n *networks) openEncryption(ctx context.Context, vtep netip.Addr, log *slog.Logger) (missing []string) {
	missing = n.describeEncryption(ctx)
	kernel, err := ipsec.New(ipsec.Options{VTEP: vtep})
	if err == nil {
		n.encryption = newEncryption(kernel, n.ack, log)
		_, err = kernel.Protect(ctx)
	}
	if err != nil {
		missing = append(missing, "network.encrypt: "+err.Error())
	}
	return missing
}

// describeEncryption adds the encryption to the host's description, and returns the features that the host lacks for
// it.
func (n *networks) describeEncryption(ctx context.Context) []string {
	missing, err := ipsec.MissingFeatures(ctx)
	if err != nil {
		missing = append(missing, err.Error())
	}
	n.description.Encrypt = true
	if n.description.Instance, err = ipsec.Instance(); err != nil {
		missing = append(missing, fmt.Sprintf("network namespace cookies (Linux 5.14): %v", err))
	}
	for i, m := range missing {
		missing[i] = "network.encrypt: " + m
	}
	return missing
}

// apply begins to set the keys of an update. It does not block. An update without keys changes nothing, even if it is a
// snapshot: a leader that does not know yet that the host encrypts sends the keys in a later update.
func (e *encryption) apply(u cloud.NetworkUpdate) {
	if u.Encryption == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.peers, e.stream, e.revision = u.Encryption, u.Stream, u.Revision
	e.number++
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// acknowledge passes an acknowledgment on to the control plane as soon as the keys of the acknowledged updates are set.
func (e *encryption) acknowledge(a cloud.NetworkAck) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.held = &a
	e.release()
}

// release passes the delayed acknowledgment on if the keys of its updates are set. The caller holds mu.
func (e *encryption) release() {
	if e.held == nil || e.applied != e.number && e.held.Stream == e.stream && e.held.Revision >= e.revision {
		return
	}
	e.ack(*e.held)
	e.held = nil
}

// run sets the keys when they change, and repairs changes by others, until ctx ends.
func (e *encryption) run(ctx context.Context) error {
	tick := time.NewTicker(e.resync)
	defer tick.Stop()
	pauses := encryptionRetries.Start()
	again := make(<-chan time.Time)
	problem := ""
	for {
		select {
		case <-e.wake:
		case <-tick.C:
		case <-again:
		case <-ctx.Done():
			return ctx.Err()
		}
		err := e.set(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			problem = ""
			pauses.Reset()
			again = nil
			continue
		case err.Error() != problem:
			problem = err.Error()
			e.log.Error("cannot set the keys of traffic to other hosts, which is dropped where keys are missing", "err", err)
		}
		again = time.After(pauses.NextBackOff())
	}
}

// set makes the kernel's policies and states those of the newest update with keys. It does nothing before the first
// such update.
func (e *encryption) set(ctx context.Context) error {
	e.mu.Lock()
	peers, number, repair := e.peers, e.number, e.applied == e.number
	e.mu.Unlock()
	if peers == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, encryptionTimeout)
	defer cancel()
	writes, err := e.kernel.Set(ctx, peers)
	if repair && len(writes) > 0 {
		e.log.Warn("repaired the encryption of traffic to other hosts, which had been changed", "writes", writes)
	}
	if err != nil {
		return err
	}
	if !repair {
		e.log.Info("keys of traffic to other hosts are set", "peers", len(peers), "writes", len(writes))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.applied = number
	e.release()
	return nil
}

// close releases the netlink sockets. The kernel's policies and states stay in force.
func (e *encryption) close() { e.kernel.Close() }
