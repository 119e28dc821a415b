package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// fakeKernel records the peers that are set. Each call of Set fails with err, unless it is nil.
type fakeKernel struct {
	mu    sync.Mutex // guards the fields below
	err   error
	calls int
	peers []cloud.EncryptedPeer
	// drift is returned as the writes of the next call.
	drift []string
}

func (k *fakeKernel) Set(_ context.Context, peers []cloud.EncryptedPeer) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls++
	if k.err != nil {
		return nil, k.err
	}
	writes := k.drift
	k.peers, k.drift = peers, nil
	return writes, nil
}

func (k *fakeKernel) Close() {}

func (k *fakeKernel) change(f func(*fakeKernel)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f(k)
}

// encryptionTest has an encryption that runs with a fake kernel.
type encryptionTest struct {
	*encryption
	kernel *fakeKernel
	acks   []cloud.NetworkAck
	log    *bytes.Buffer
}

func startEncryption(t *testing.T) *encryptionTest {
	e := &encryptionTest{kernel: &fakeKernel{}, log: &bytes.Buffer{}}
	e.encryption = newEncryption(e.kernel, func(a cloud.NetworkAck) { e.acks = append(e.acks, a) }, slog.New(slog.NewTextHandler(e.log, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = e.run(ctx) })
	t.Cleanup(func() { cancel(); work.Wait() })
	return e
}

func secretPeer() cloud.EncryptedPeer {
	p := cloud.EncryptedPeer{VTEP: netip.MustParseAddr("192.0.2.2"), Send: cloud.ESPState{SPI: 300}}
	copy(p.Send.Key[:], bytes.Repeat([]byte("K"), len(p.Send.Key)))
	return p
}

// TestAcknowledgmentWaitsForKeys checks that an update with keys is acknowledged only when its keys are set, that
// attempts are repeated, and that other acknowledgments do not wait.
func TestAcknowledgmentWaitsForKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := startEncryption(t)
		peers := []cloud.EncryptedPeer{secretPeer()}
		e.kernel.change(func(k *fakeKernel) { k.err = errors.New("no memory") })
		e.apply(cloud.NetworkUpdate{Snapshot: true, Stream: 1, Revision: 10, Encryption: peers})
		e.acknowledge(cloud.NetworkAck{Stream: 1, Revision: 10})
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Empty(t, e.acks, "the keys are not set")
		require.Greater(t, e.kernel.calls, 2)

		e.kernel.change(func(k *fakeKernel) { k.err = nil })
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []cloud.NetworkAck{{Stream: 1, Revision: 10}}, e.acks)
		require.Equal(t, peers, e.kernel.peers)

		e.apply(cloud.NetworkUpdate{Stream: 1, Revision: 11})
		e.acknowledge(cloud.NetworkAck{Stream: 1, Revision: 11})
		require.Len(t, e.acks, 2, "an update without keys does not wait")
		e.kernel.change(func(k *fakeKernel) { k.err = errors.New("no memory") })
		e.apply(cloud.NetworkUpdate{Stream: 1, Revision: 12, Encryption: []cloud.EncryptedPeer{}})
		e.acknowledge(cloud.NetworkAck{Stream: 1, Revision: 11, Failures: []cloud.VPCFailure{{VPC: "v"}}})
		require.Len(t, e.acks, 3, "an acknowledgment of an update before the keys does not wait")
		e.acknowledge(cloud.NetworkAck{Stream: 1, Revision: 13})
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, e.acks, 3)
		require.NotContains(t, e.log.String(), "KKK")
	})
}

// TestEncryptionIsRepaired checks that changes by others are repaired after half a minute, and logged without keys, and
// that only updates with keys change the keys.
func TestEncryptionIsRepaired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := startEncryption(t)
		time.Sleep(2 * encryptionResync)
		synctest.Wait()
		require.Zero(t, e.kernel.calls, "the states of an earlier process stay until the first snapshot")
		e.apply(cloud.NetworkUpdate{Snapshot: true, Stream: 1, Revision: 10, Encryption: []cloud.EncryptedPeer{secretPeer()}})
		synctest.Wait()
		require.NotContains(t, e.log.String(), "repaired")
		e.kernel.change(func(k *fakeKernel) { k.drift = []string{"add the policy in for VXLAN of 192.0.2.1"} })
		time.Sleep(encryptionResync)
		synctest.Wait()
		require.Contains(t, e.log.String(), "repaired")
		require.NotContains(t, e.log.String(), "KKK")

		e.apply(cloud.NetworkUpdate{Snapshot: true, Stream: 2, Revision: 1})
		time.Sleep(encryptionResync)
		synctest.Wait()
		require.Len(t, e.kernel.peers, 1, "a snapshot without keys removes no keys")
		e.apply(cloud.NetworkUpdate{Stream: 2, Revision: 2, Encryption: []cloud.EncryptedPeer{}})
		synctest.Wait()
		require.Empty(t, e.kernel.peers)
	})
}

// TestEncryptionIsDescribed checks that the control plane learns that the host encrypts, and what it lacks for that.
func TestEncryptionIsDescribed(t *testing.T) {
	c := Default()
	require.NotContains(t, describe(c, facts.Host{}, facts.Accelerator{}, hostCPUs{}).heartbeat().GetLabels(), encryptLabel)
	c.Network.Encrypt = true
	require.Equal(t, "true", describe(c, facts.Host{}, facts.Accelerator{}, hostCPUs{}).heartbeat().GetLabels()[encryptLabel])

	n := &networks{description: &agentv1.HostNetwork{}}
	missing := n.describeEncryption(t.Context())
	require.True(t, n.description.GetEncrypt())
	require.NotEmpty(t, n.description.GetInstance())
	require.LessOrEqual(t, len(n.description.GetInstance()), 64)
	for _, m := range missing {
		require.Contains(t, m, "network.encrypt: ")
		require.LessOrEqual(t, len(m), 256)
	}
	again := &networks{description: &agentv1.HostNetwork{}}
	again.describeEncryption(t.Context())
	require.Equal(t, n.description.GetInstance(), again.description.GetInstance(), "a restarted agent reports the same instance")
}
