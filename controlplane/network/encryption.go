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
	// RotateEvery is the time between two checks whether the keys must be rotated.
	RotateEvery = time.Minute
	// keyLifetime is the time after which the keys are rotated, and maxKeyLifetime that after which they are rotated
	// even if hosts are not connected.
	keyLifetime    = 24 * time.Hour
	maxKeyLifetime = 7 * keyLifetime
	// firstEpoch is the epoch before the first rotation.
	firstEpoch   = 1
	keyEpochPath = "system"
)

// keyEpoch is the number of the keys with which hosts send.
type keyEpoch struct {
	Epoch uint64
	Since cloud.Time
}

// keyEpochs has the present epoch, at net-key-epoch/system. There is none until a host encrypts.
var keyEpochs = store.NewTable[keyEpoch]("net-key-epoch")

// encryptedHost is a host that encrypts, as its keys depend on it.
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

// countEncrypting records that the network of a host changes from one to another; nil is no network.
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

// setEpoch stores the present epoch; nil is the first one. revision is that of the change.
func (x *index) setEpoch(e *keyEpoch, revision int64) {
	x.epoch, x.epochRevision = firstEpoch, revision
	if e != nil {
		x.epoch = e.Epoch
	}
	x.peersVersion++
}

// peersChange adds the hosts that need a VPC to out, because the set of these hosts has changed.
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

// peersOf returns the hosts with which a host exchanges encrypted packets: those that need a VPC that the host needs,
// and encrypt. Of several hosts that report the same address, it returns only the one with the lowest number, which is
// usually the oldest: another host must not get packets for this one encrypted with its own keys. It returns nil if the
// host does not encrypt.
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
// while the index has another network of the host than this stream: the keys would be those of a former instance. The
// caller holds Feed.mu.
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

// message returns the keys of all peers.
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

// espState returns the state of packets from one host to another. Its SPI has the number of the sender, so states for
// packets of different senders differ at the receiver, and the lower bits of the epoch.
func espState(secret []byte, epoch uint64, from, to encryptedHost) *agentv1.EspState {
	info := fmt.Sprintf("%d %q %q %q %q", epoch, from.node, from.instance, to.node, to.instance)
	key, err := hkdf.Key(sha256.New, secret, nil, info, len(cloud.ESPKey{}))
	if err != nil {
		panic(err) // only for lengths that HKDF does not support
	}
	return &agentv1.EspState{Spi: from.number<<8 | uint32(epoch&0xff), Key: key}
}

// RotateKeys begins the next epoch if the present one is older than 24 hours, and all hosts that encrypt are connected
// and have acknowledged it. After seven days, hosts that are not connected no longer prevent the rotation: such a host
// can exchange packets with the others for one more epoch. The leader calls RotateKeys every RotateEvery.
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
