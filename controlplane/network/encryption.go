package network

import (
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// The keys of the encryption between hosts are not stored: the key for packets from one host to another is derived from
// a secret of the cluster, both hosts and their instances, and the epoch. A host gets the keys of its own pairs only.
//
// A host sends with the key of one epoch, and receives with those of the epoch before and after it too. So two hosts
// whose epochs differ by one can exchange packets. RotateKeys begins the next epoch only when all connected hosts have
// acknowledged the present one.

const (
	// RotateEvery is the interval between two calls of RotateKeys.
	RotateEvery = time.Minute
	// keyLifetime is the age at which the keys are rotated if all hosts that encrypt are connected. At the age
	// maxKeyLifetime they are rotated even if some of these hosts are not connected.
	keyLifetime    = 24 * time.Hour
	maxKeyLifetime = 7 * keyLifetime
	// firstEpoch is the epoch before the first rotation.
	firstEpoch   = 1
	keyEpochPath = "system"
)

// keyEpoch is a generation of keys. Epoch is its number, and Since is when the leader began it.
type keyEpoch struct {
	Epoch uint64
	Since cloud.Time
}

// keyEpochs has the present epoch, at net-key-epoch/system. The record does not exist before the first host encrypts.
var keyEpochs = store.NewTable[keyEpoch]("net-key-epoch")

// encryptedHost has the properties of a host that encrypts. The keys of the host are derived from them.
type encryptedHost struct {
	node     cloud.NodeID
	vtep     netip.Addr
	instance string
	number   uint32
}

// peerList are the peers of a host, and the epoch of their keys.
type peerList struct {
	epoch uint64
	own   encryptedHost
	peers []encryptedHost // sorted by address, which no two have in common
}

func (p *peerList) equal(q *peerList) bool {
	return p != nil && p.epoch == q.epoch && p.own == q.own && slices.Equal(p.peers, q.peers)
}

// encryptedHost returns the host with an ID if it encrypts.
func (x *index) encryptedHost(node cloud.NodeID) (h encryptedHost, encrypts bool) {
	n := x.networks[node]
	if n == nil || !n.Encrypt || !n.VTEP.IsValid() {
		return h, false
	}
	return encryptedHost{node: node, vtep: n.VTEP, instance: n.Instance, number: n.Number}, true
}

// countEncrypting updates x.encrypting and x.peersVersion when the network record of a host changes. nil means that the
// host has no record.
func (x *index) countEncrypting(from, to *cloud.HostNetwork) {
	if from != nil && from.Encrypt {
		x.encrypting--
		x.peersVersion++
	}
	if to != nil && to.Encrypt {
		x.encrypting++
		x.peersVersion++
	}
}

// setEpoch records the present epoch in the index. nil means the first epoch. revision is the store revision of the
// change.
func (x *index) setEpoch(e *keyEpoch, revision int64) {
	x.epoch, x.epochRevision = firstEpoch, revision
	if e != nil {
		x.epoch = e.Epoch
	}
	x.peersVersion++
}

// peersChange appends the hosts that need a VPC to out. It is called when the set of these hosts has changed.
func (x *index) peersChange(out []hostChange, vpc cloud.VPCID) []hostChange {
	if x.encrypting == 0 {
		return out
	}
	x.peersVersion++
	if v := x.vpcs[vpc]; v != nil {
		for node := range v.hosts {
			out = append(out, hostChange{node: node})
		}
	}
	return out
}

// peersOf returns the hosts with which a host exchanges encrypted packets: the hosts that encrypt and need a VPC that
// the host needs. If several hosts report the same address, peersOf returns only the one with the lowest number, which
// is usually the oldest. So a host that reports the address of another host cannot cause packets for the other host to
// be encrypted with its own keys. peersOf returns nil if the host does not encrypt.
func (x *index) peersOf(node cloud.NodeID) *peerList {
	own, encrypts := x.encryptedHost(node)
	if !encrypts {
		return nil
	}
	p := &peerList{epoch: x.epoch, own: own}
	known := map[cloud.NodeID]bool{node: true}
	for id := range x.needs[node] {
		for other := range x.vpcs[id].hosts {
			if known[other] {
				continue
			}
			known[other] = true
			if h, encrypts := x.encryptedHost(other); encrypts && h.vtep.Is4() == own.vtep.Is4() && h.vtep != own.vtep {
				p.peers = append(p.peers, h)
			}
		}
	}
	slices.SortFunc(p.peers, func(a, b encryptedHost) int {
		return cmp.Or(a.vtep.Compare(b.vtep), cmp.Compare(a.number, b.number))
	})
	p.peers = slices.CompactFunc(p.peers, func(a, b encryptedHost) bool { return a.vtep == b.vtep })
	return p
}

// takePeers returns the host's peers if they or their keys differ from those that the host has received. It returns nil
// while the network of the host in the index differs from the one that the host reported on this stream, because the
// keys would then be those of a former instance of the host. The caller holds Feed.mu.
func (s *feedSession) takePeers(x *index) *peerList {
	if !s.host.Encrypt || s.peersVersion == x.peersVersion {
		return nil
	}
	now := x.peersOf(s.node)
	if now == nil || now.own.instance != s.host.Instance || now.own.vtep != s.host.VTEP {
		return nil
	}
	s.peersVersion = x.peersVersion
	if s.peers.equal(now) {
		return nil
	}
	s.peers = now
	return now
}

// message returns the message with the keys of all peers. The keys are derived from secret.
func (p *peerList) message(secret []byte) *agentv1.HostEncryption {
	m := &agentv1.HostEncryption{Epoch: p.epoch}
	for _, peer := range p.peers {
		out := &agentv1.EncryptedPeer{Vtep: peer.vtep.String(), Send: espState(secret, p.epoch, p.own, peer)}
		for _, epoch := range []uint64{p.epoch - 1, p.epoch, p.epoch + 1} {
			out.Receive = append(out.Receive, espState(secret, epoch, peer, p.own))
		}
		m.Peers = append(m.Peers, out)
	}
	return m
}

// espState returns the ESP state for packets from one host to another. Its SPI consists of the number of the sender and
// the lower 8 bits of the epoch. So a receiver's states for different senders have different SPIs.
func espState(secret []byte, epoch uint64, from, to encryptedHost) *agentv1.EspState {
	info := fmt.Sprintf("%d %q %q %q %q", epoch, from.node, from.instance, to.node, to.instance)
	key, err := hkdf.Key(sha256.New, secret, nil, info, len(cloud.ESPKey{}))
	if err != nil {
		panic(err) // only for lengths that HKDF does not support
	}
	return &agentv1.EspState{Spi: from.number<<8 | uint32(epoch&0xff), Key: key}
}

// RotateKeys begins the next epoch if the present epoch is older than 24 hours, and all hosts that encrypt are
// connected and have acknowledged the present epoch. After seven days, RotateKeys no longer waits for hosts that are
// not connected. A host that misses one rotation can still exchange packets with the others. The leader calls
// RotateKeys every RotateEvery.
func (f *Feed) RotateKeys(ctx context.Context) error {
	epoch, lifetime := f.rotatable()
	if lifetime == 0 {
		return nil
	}
	due := func(e *keyEpoch, now cloud.Time) bool {
		return e == nil || e.Epoch == epoch && now-e.Since >= lifetime.Milliseconds()
	}
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	_, err := f.opts.Store.Update(ctx, func(tx *store.Tx) error {
		e, err := keyEpochs.Get(tx, keyEpochPath)
		if err != nil || !due(e, tx.Now()) {
			return err
		}
		if e == nil {
			e = &keyEpoch{Epoch: firstEpoch}
		} else {
			e.Epoch++
		}
		e.Since = tx.Now()
		keyEpochs.Put(tx, e, keyEpochPath)
		return nil
	})
	return err
}

// rotatable returns the present epoch, and the age at which it may end. The age is 0 if the epoch must not end yet: no
// host encrypts, or a connected host has not acknowledged the epoch.
func (f *Feed) rotatable() (epoch uint64, lifetime time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.index
	if x == nil || x.encrypting == 0 {
		return 0, 0
	}
	connected := 0
	for node, s := range f.sessions {
		if _, encrypts := x.encryptedHost(node); !encrypts {
			continue
		}
		connected++
		acknowledged := s.peers != nil && s.peers.epoch == x.epoch && s.acked >= x.epochRevision
		if !acknowledged && !mutant.On(mutant.RotateEarly) {
			return x.epoch, 0
		}
	}
	if connected < x.encrypting {
		return x.epoch, maxKeyLifetime
	}
	return x.epoch, keyLifetime
}
