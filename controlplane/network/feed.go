package network

import (
	"context"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// FeedOptions configures NewFeed. Store is required.
type FeedOptions struct {
	Store *store.Store
	// Listeners returns the address, host:port, of each member. Hosts drop packets of guests to them. Optional.
	Listeners func() map[uint64]string
	// Key is the secret from which the keys of the encryption between hosts are derived, 32 bytes. Required if a host
	// encrypts.
	Key []byte
	// Metrics, if not nil, registers the metrics of the feed.
	Metrics prometheus.Registerer
}

// Feed sends hosts the VPCs that they need. A host needs the VPCs of the ports and NAT gateways that are bound to it,
// and the VPCs that have an ACTIVE peering with one of these.
//
// Follow runs on the leader. It watches the tables of the network service in one ordered stream, and has in memory
// which host needs which VPC and which record belongs to which VPC, but not the records (index). Each SyncNetworks
// stream of a host is a session. When a record changes, Follow adds its key to the sessions of the hosts that need its
// VPC. The session reads the record when it sends it. So a slow host gets the newest state of a record and not each
// state between, and no message has an older state of a record than an earlier message.
//
// The revision of a message is that up to which Follow had read the watch when the message was composed. The message
// has each change up to this revision. It can have newer changes, which are sent again with their own revision.
type Feed struct {
	opts    FeedOptions
	metrics feedMetrics
	// reads counts the records that the feed has read.
	reads atomic.Int64
	// protectedInterval is the constant protectedInterval, unless a test sets another value.
	protectedInterval time.Duration

	mu sync.Mutex
	// index is nil while this member does not lead, and until Follow has read all records.
	index *index
	// begun is closed when index is set. It is replaced when index becomes nil.
	begun    chan struct{}
	sessions map[cloud.NodeID]*feedSession
}

// NewFeed returns a Feed. The caller runs Follow on the leader.
func NewFeed(opts FeedOptions) *Feed {
	return &Feed{
		opts: opts, metrics: newFeedMetrics(opts.Metrics), begun: make(chan struct{}),
		sessions: map[cloud.NodeID]*feedSession{}, protectedInterval: protectedInterval,
	}
}

// scanPage is the number of records that Follow reads at a time at the start of a term.
const scanPage = 1000

// Follow reads all network records and then follows their changes until ctx ends with the term. Package leader runs it
// on the leader. When it returns, it ends all sessions, and the hosts begin new ones.
func (f *Feed) Follow(ctx context.Context) error {
	defer f.reset()
	x := newIndex()
	if err := f.opts.Store.View(ctx, func(v *store.View) error { return f.scan(v, x) }); err != nil {
		return err
	}
	w := f.opts.Store.WatchTables(x.revision+1, "net-")
	defer w.Close()
	f.mu.Lock()
	f.index = x
	close(f.begun)
	f.mu.Unlock()
	var unapplied []store.TableChange
	for {
		changes, revision, err := w.Next(ctx)
		if err != nil {
			return err
		}
		// Apply the changes of a transaction together: the last transaction in changes can have more.
		unapplied = append(unapplied, changes...)
		n := sort.Search(len(unapplied), func(i int) bool { return unapplied[i].Revision > revision })
		if err := f.apply(slices.Clone(unapplied[:n]), revision); err != nil {
			return err
		}
		unapplied = slices.Delete(unapplied, 0, n)
	}
}

// reset removes the index, if there is one, and ends all sessions.
func (f *Feed) reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.index == nil {
		return
	}
	f.index, f.begun = nil, make(chan struct{})
	for _, s := range f.sessions {
		s.cancel(fault.New(fault.Unavailable, "this member no longer follows the changes of networks").MayRetry())
	}
}

// scan adds all network records to the index x.
func (f *Feed) scan(v *store.View, x *index) error {
	x.revision = v.Revision()
	hosts, _, err := hostNetworks.List(v, 0)
	if err != nil {
		return err
	}
	for _, h := range hosts {
		x.setHost(cloud.NodeID(h.Path[0]), h.Value)
	}
	epoch, err := keyEpochs.Get(v, keyEpochPath)
	if err != nil {
		return err
	}
	x.setEpoch(epoch, x.revision)
	for kind, k := range feedKinds {
		var after []string
		for more := true; more; {
			var page []store.Record[any]
			if page, more, err = k.list(v, scanPage, after); err != nil {
				return err
			}
			for _, r := range page {
				x.set(recordKey{uint8(kind), cloud.ProjectID(r.Path[0]), r.Path[1]}, *r.Value, x.revision)
				after = r.Path
			}
			f.reads.Add(int64(len(page)))
		}
	}
	return nil
}

// apply updates the index for changed records and tells the sessions of the hosts which of these records to send.
// revision is that up to which the watch has returned every change.
//
// apply reads the records from this member without a quorum read, because a watch returns a change only after it was
// applied to these records. A record can be newer than its change. Then the watch returns the newer change later.
func (f *Feed) apply(changes []store.TableChange, revision int64) error {
	changes = slices.DeleteFunc(changes, func(c store.TableChange) bool {
		_, known := kindNumbers[c.Table]
		return !known && c.Table != hostNetworks.Name() && c.Table != keyEpochs.Name()
	})
	// A floating IP gets its VPC from the index entry of its port, so ports come first.
	slices.SortStableFunc(changes, func(a, b store.TableChange) int { return kindNumbers[a.Table] - kindNumbers[b.Table] })
	values := make([]any, len(changes))
	if err := f.opts.Store.Local(func(v *store.View) (err error) {
		for i, c := range changes {
			if values[i], err = f.read(v, c); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.index.revision = revision
	for i, c := range changes {
		switch c.Table {
		case hostNetworks.Name():
			host, _ := values[i].(*cloud.HostNetwork)
			underlay, peers := f.index.underlayVersion, f.index.peersVersion
			f.notify(f.index.setHost(cloud.NodeID(c.Path[0]), host))
			if f.index.underlayVersion != underlay || f.index.peersVersion != peers {
				f.notifyAll()
			}
		case keyEpochs.Name():
			epoch, _ := values[i].(*keyEpoch)
			f.index.setEpoch(epoch, c.Revision)
			f.notifyAll()
		default:
			key := recordKey{uint8(kindNumbers[c.Table]), cloud.ProjectID(c.Path[0]), c.Path[1]}
			f.notify(f.index.set(key, values[i], c.Revision))
		}
	}
	return nil
}

// read returns the record of a change, or nil if it does not exist.
func (f *Feed) read(v *store.View, c store.TableChange) (any, error) {
	f.reads.Add(1)
	switch c.Table {
	case hostNetworks.Name():
		return found(hostNetworks.Get(v, c.Path...))
	case keyEpochs.Name():
		return found(keyEpochs.Get(v, c.Path...))
	}
	return feedKinds[kindNumbers[c.Table]].get(v, c.Path...)
}

// notifyAll wakes all sessions. The caller holds f.mu.
func (f *Feed) notifyAll() {
	for _, s := range f.sessions {
		s.mark(hostChange{node: s.node})
	}
}

// notify adds the changed records to the sessions of the hosts that have to get them. The caller holds f.mu.
func (f *Feed) notify(changed []hostChange) {
	for _, c := range changed {
		if s := f.sessions[c.node]; s != nil {
			s.mark(c)
		}
	}
}
