package robustness

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"go.etcd.io/etcd/tests/v3/robustness/client"
	"go.etcd.io/etcd/tests/v3/robustness/identity"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.etcd.io/etcd/tests/v3/robustness/traffic"
	"go.etcd.io/etcd/tests/v3/robustness/validate"
)

// Round describes one run: a new cluster, its traffic and its faults.
type Round struct {
	Server Server
	Dir    string // must be empty; afterwards it holds the members' logs and data
	Seed   uint64
	// Traffic is the kind of traffic. If Compact is set, history is compacted during the traffic.
	Traffic traffic.Traffic
	Compact bool
	Faults  []string // names of faults, in the order of injection
	Log     *zap.Logger
}

// Outcome holds statistics of a round.
type Outcome struct {
	Succeeded, Failed int           // numbers of requests
	Events            int           // events that watches received
	Persisted         int           // requests in the log
	Checked           time.Duration // how long the check took
}

// trafficLoad holds the limits of the key-value traffic. They allow as much traffic as the check can handle in one
// round.
var trafficLoad = traffic.KeyValue{
	MaximalQPS: 400, BurstableQPS: 400, MemberClientCount: 3, ClusterClientCount: 1, MaxNonUniqueRequestConcurrency: 2,
}

var watchLoad = traffic.Watch{MemberClientCount: 3, ClusterClientCount: 1, RevisionOffsetRange: traffic.Range{Min: -100, Max: 100}}

// compactInterval is the pause between compactions.
const compactInterval = 200 * time.Millisecond

// checkTimeout is the maximum time for which etcd's model searches for an order of the requests that explains all
// responses.
const checkTimeout = time.Minute

// DrawFaults returns the names of n different faults in random order.
func DrawFaults(r *rand.Rand, n int) []string {
	var names []string
	for _, f := range faults {
		names = append(names, f.name)
	}
	r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	return names[:min(n, len(names))]
}

// Run runs the round and checks what the clients received. An error for which IsViolation is true means that the server
// broke a guarantee.
func (r Round) Run(ctx context.Context) (out Outcome, err error) {
	c, err := newCluster(ctx, r.Server, r.Dir)
	if err != nil {
		return out, fmt.Errorf("start cluster: %w", err)
	}
	defer func() { err = errors.Join(err, c.close()) }()
	reports, err := r.runTraffic(ctx, c)
	if err != nil {
		return out, err
	}
	for _, one := range reports {
		for _, op := range one.KeyValue {
			if op.Output.(model.MaybeEtcdResponse).Error == "" {
				out.Succeeded++
			} else {
				out.Failed++
			}
		}
		for _, w := range one.Watch {
			for _, response := range w.Responses {
				out.Events += len(response.Events)
			}
		}
	}
	if err := c.sameHash(ctx); err != nil {
		return out, violation{fmt.Errorf("hashes: %w", err)}
	}
	if err := c.stop(); err != nil {
		return out, err
	}
	requests, err := c.persisted(r.Log)
	if err != nil {
		return out, fmt.Errorf("read the log: %w", err)
	}
	out.Persisted = len(requests)
	began := time.Now()
	err = r.check(reports, requests)
	out.Checked = time.Since(began)
	return out, err
}

// check runs the checks of etcd's model. The model panics if a watch received an event whose revision is not in the
// log. check reports this as a violation, too.
func (r Round) check(reports []report.ClientReport, requests []model.EtcdRequest) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = violation{fmt.Errorf("a watch received an event that is not in the log: %v", p)}
		}
	}()
	result := validate.ValidateAndReturnVisualize(r.Log, validate.Config{ExpectRevisionUnique: r.Traffic.ExpectUniqueRevision()},
		dropFailedWithoutEffect(reports, requests), requests, checkTimeout)
	if s := result.Linearization.Status; s == validate.Timeout || s == validate.DeadlineExceeded {
		return ErrUndecided
	}
	if err := result.Error(); err != nil {
		return violation{err}
	}
	return nil
}

// ErrUndecided is returned if the model's search for an order of the requests took longer than checkTimeout. It is then
// unknown whether the server broke a guarantee.
var ErrUndecided = errors.New("no verdict within " + checkTimeout.String())

// violation is the error for a broken guarantee.
type violation struct{ error }

func (v violation) Unwrap() error { return v.error }

// IsViolation reports whether err means that the server broke a guarantee. It returns false if err means that a round
// could not be completed.
func IsViolation(err error) bool {
	var v violation
	return errors.As(err, &v)
}

// runTraffic runs traffic and faults. It returns the requests of all clients, with their responses and events.
func (r Round) runTraffic(ctx context.Context, c *cluster) ([]report.ClientReport, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	random := rand.New(rand.NewPCG(r.Seed, 1))
	base, ids := time.Now(), identity.NewIDProvider()
	clients, watchers := client.NewSet(ids, base), client.NewSet(ids, base)
	defer clients.Close()
	defer watchers.Close()
	if err := traffic.CheckEmptyDatabaseAtStart(ctx, r.Log, c.endpoints(), clients); err != nil {
		return nil, err
	}
	var work sync.WaitGroup
	finish := make(chan struct{})
	if err := r.startTraffic(ctx, &work, c, clients, finish); err != nil {
		return nil, err
	}
	// At each member, one watcher receives the events of all writes, from the first to the last.
	last := make(chan int64, 1)
	collected := make(chan error, 1)
	go func() {
		collected <- client.CollectClusterWatchEvents(ctx, client.CollectClusterWatchEventsParam{
			Lg: r.Log, Endpoints: c.endpoints(), MaxRevisionChan: last, ClientSet: watchers,
		})
	}()
	err := r.injectFaults(ctx, c, random)
	close(finish)
	if err == nil {
		err = c.ready(ctx)
	}
	if err == nil {
		work.Wait()
		err = r.finalWrite(ctx, c, clients)
	}
	if err != nil {
		cancel() // some requests of the traffic would otherwise wait forever
		close(last)
		work.Wait()
		<-collected
		return nil, fmt.Errorf("run traffic and faults: %w", err)
	}
	final := report.OperationsMaxRevision(clients.Reports())
	if err = c.reached(ctx, final); err == nil {
		last <- final
	}
	close(last) // ends the watchers if they have no revision to wait for
	if failed := <-collected; err == nil && failed != nil {
		err = fmt.Errorf("collect all events: %w", failed)
	}
	if err != nil {
		return nil, err
	}
	if err := flushCommitIndex(ctx, c); err != nil {
		return nil, err
	}
	return slices.Concat(clients.Reports(), watchers.Reports()), nil
}

// startTraffic starts clients that read, write and watch. If r.Compact is set, it also starts a client that compacts.
// The clients end when finish is closed.
func (r Round) startTraffic(ctx context.Context, work *sync.WaitGroup, c *cluster, clients *client.ClientSet, finish chan struct{}) error {
	limiter := rate.NewLimiter(rate.Limit(trafficLoad.MaximalQPS), trafficLoad.BurstableQPS)
	keys, storage := traffic.NewKeyStore(10, "key"), traffic.NewKubernetesStorage()
	err := traffic.SimulateKeyValueTraffic(ctx, work, &trafficLoad, c.endpoints(), clients, r.Traffic, traffic.RunTrafficLoopParam{
		QPSLimiter: limiter, IDs: clients.IdentityProvider(), LeaseIDStorage: identity.NewLeaseIDStorage(),
		NonUniqueRequestConcurrencyLimiter: traffic.NewConcurrencyLimiter(trafficLoad.MaxNonUniqueRequestConcurrency),
		KeyStore:                           keys, Storage: storage, Finish: finish,
	})
	if err != nil {
		return err
	}
	err = traffic.SimulateWatchTraffic(ctx, work, &watchLoad, c.endpoints(), clients, r.Traffic, traffic.RunWatchLoopParam{
		Config: watchLoad, QPSLimiter: limiter, KeyStore: keys, Storage: storage, Finish: finish, Logger: r.Log,
	})
	if err != nil || !r.Compact {
		return err
	}
	if r.Traffic.ExpectUniqueRevision() {
		return traffic.SimulateCompactionTraffic(ctx, work, &traffic.Compaction{}, c.endpoints(), clients, r.Traffic,
			traffic.RunCompactLoopParam{Period: compactInterval, Finish: finish})
	}
	recorded, err := clients.NewClient(c.endpoints())
	if err != nil {
		return err
	}
	random := rand.New(rand.NewPCG(r.Seed, 2))
	work.Go(func() { compact(ctx, c, recorded, random, finish) })
	return nil
}

// reached returns a violation if the members' current revision is less than one that a client has received in a
// response: the members have then lost acknowledged writes, or the read is outdated. The watchers would wait for lost
// revisions forever.
func (c *cluster) reached(ctx context.Context, acknowledged int64) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	now, err := c.client.Get(ctx, "ready")
	if err != nil {
		return fmt.Errorf("read the current revision: %w", err)
	}
	if now.Header.Revision < acknowledged {
		return violation{fmt.Errorf("the members are at revision %d, but a response had revision %d: writes are lost, or a read is outdated", now.Header.Revision, acknowledged)}
	}
	return nil
}

// compact requests compactions at random revisions. Each is between the last compaction and 4 revisions after the
// current revision. The function replaces the loop in etcd's suite, which reads the current revision with a call that
// in Trivet only administrators may make.
func compact(ctx context.Context, c *cluster, recorded *client.RecordingClient, random *rand.Rand, finish chan struct{}) {
	defer recorded.Close()
	last := int64(2)
	for {
		select {
		case <-time.After(compactInterval):
		case <-ctx.Done():
			return
		case <-finish:
			return
		}
		one, cancel := context.WithTimeout(ctx, traffic.RequestTimeout)
		now, err := c.client.Get(one, "ready")
		cancel()
		if err != nil {
			continue
		}
		revision := last + random.Int64N(max(now.Header.Revision+5-last, 1))
		one, cancel = context.WithTimeout(ctx, 5*time.Second)
		if _, err := recorded.Compact(one, revision); err == nil {
			last = revision
		}
		cancel()
	}
}

// injectFaults injects the faults, with traffic before, between and after them.
func (r Round) injectFaults(ctx context.Context, c *cluster, random *rand.Rand) error {
	waitRandom(ctx, random, time.Second, 1500*time.Millisecond)
	for _, name := range r.Faults {
		i := slices.IndexFunc(faults, func(f fault) bool { return f.name == name })
		if i < 0 {
			return fmt.Errorf("there is no fault %q", name)
		}
		r.Log.Info("fault", zap.String("name", name))
		if err := faults[i].act(ctx, c, random); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		waitRandom(ctx, random, 500*time.Millisecond, 2*time.Second)
	}
	return ctx.Err()
}

// finalWrite makes a write after all other traffic and repeats it until it succeeds. The write is recorded like the
// traffic, because the check needs a recorded last write.
func (r Round) finalWrite(ctx context.Context, c *cluster, clients *client.ClientSet) error {
	recorded, err := clients.NewClient(c.endpoints())
	if err != nil {
		return err
	}
	return retryUntil(ctx, "the last write succeeds", func(ctx context.Context) error {
		_, err := recorded.Put(ctx, "tombstone", "true")
		return err
	})
}

// flushCommitIndex makes four writes. Afterwards, the commit index that each member has stored covers all earlier
// writes.
func flushCommitIndex(ctx context.Context, c *cluster) error {
	for i := range 4 {
		err := retryUntil(ctx, "the writes that flush the commit index succeed", func(ctx context.Context) error {
			_, err := c.client.Put(ctx, "flush", fmt.Sprint(i))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
