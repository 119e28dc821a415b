package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/bench/openloop"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

const (
	// rate is the load in requests per second. Of each hundred requests, getsOf100 get a VM, listsOf100 list a page of
	// 100 VMs, and the remaining one creates a VM.
	rate, getsOf100, listsOf100 = 1000, 90, 9
	// conns is the number of connections to each member over which the load is sent.
	conns = 64
	// fillers is the number of VMs that fill creates concurrently.
	fillers = 64
	// projects is the number of projects among which the VMs are divided equally.
	projects = 4
	// pairs is the number of pairs of runs. In the first run of each pair all hosts work; in the second, one host is
	// stopped with SIGSTOP.
	pairs = 2
	// getAtMost and listAtMost are the targets for the p99 of gets and lists, in ms. stoppedAtMost is the target for
	// the ratio of the p99 with one host stopped to the p99 with all hosts working.
	getAtMost, listAtMost, stoppedAtMost = 20, 100, 1.2
)

// project is one project of the benchmark, with its VMs and with clients that act as its user.
type project struct {
	name  string
	rest  [3]*lab.REST // one client per member, in order of id
	vms   []string
	pages []string // a request path, with page token, for each full page of the project's VM list
}

// recorded is a cloud whose store holds many VMs, on simulated hosts.
type recorded struct {
	c        *trivet
	fleet    *fleet
	image    string
	projects []*project
	created  atomic.Int64
	random   *rand.Rand
	rate     float64 // of the load, in requests per second
}

// api creates many VMs on simulated hosts and measures the latency of the API under load.
func api(ctx context.Context, b *bench) (err error) {
	c, err := newCloud(ctx, b, "api")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	images, err := lab.ImportGuest(ctx, c.Trio, c.Admin, b.guest)
	if err != nil {
		return err
	}
	f, err := startFleet(ctx, c, fleetOptions{hosts: b.hosts, perProcess: 1, vcpus: 100_000})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	r := &recorded{c: c, fleet: f, image: images.Disk, random: rand.New(rand.NewPCG(1, 2)), rate: rate}
	if err := r.fill(ctx, b); err != nil {
		return fmt.Errorf("record VMs: %w", err)
	}
	return r.measure(ctx, b)
}

// fill creates the VMs through the API and waits until the hosts have reported all of them as built. It adds a row with
// the number of VMs created per second.
func (r *recorded) fill(ctx context.Context, b *bench) error {
	if err := r.openProjects(ctx, b.vms/projects); err != nil {
		return err
	}
	began, cpu, hosts := time.Now(), cpuOf(r.c.Members()...), cpuOf(r.fleet.pids()...)
	group, bounded := errgroup.WithContext(ctx)
	group.SetLimit(fillers)
	for i := range b.vms / projects * projects {
		group.Go(func() error {
			p := r.projects[i%projects]
			var vm lab.VM
			err := p.rest[i%3].Call(bounded, "POST", "/api/v1/vms", vmBody(r.name(), r.image), &vm)
			p.vms[i/projects] = vm.ID
			if i%4000 == 0 {
				report.Say("%d of %d VMs are recorded", i, b.vms)
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	took := time.Since(began).Seconds()
	for _, p := range r.projects {
		if err := r.awaitBuilt(ctx, p); err != nil {
			return err
		}
	}
	all := time.Since(began).Seconds()
	n := float64(b.vms)
	b.row(figure.Row{
		What: fmt.Sprintf("record %d VMs through the API, %d callers", b.vms, fillers), Ours: fmt.Sprintf("%.0f /s", n/took),
		Note: fmt.Sprintf("all reported BUILT after %.0f s; CPU per VM, its reports included: members %.2f ms, %d simulated hosts %.2f ms",
			all, (cpuOf(r.c.Members()...)-cpu)/n*1000, b.hosts, (cpuOf(r.fleet.pids()...)-hosts)/n*1000),
	})
	return nil
}

// openProjects creates the projects, each with room for n VMs, and clients of their users.
func (r *recorded) openProjects(ctx context.Context, n int) error {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: fillers}}
	for i := range projects {
		p := &project{name: fmt.Sprintf("p%d", i), vms: make([]string, n)}
		rest, err := r.c.Tenant(ctx, 1, p.name)
		if err != nil {
			return err
		}
		for m := range p.rest {
			p.rest[m] = &lab.REST{Host: r.c.Trio.Members[m+1], Token: rest.Token, HTTP: client}
		}
		r.projects = append(r.projects, p)
	}
	return nil
}

func (r *recorded) name() string { return fmt.Sprintf("vm-%d", r.created.Add(1)) }

func (r *recorded) awaitBuilt(ctx context.Context, p *project) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	return lab.Until(ctx, "all VMs are built", func(ctx context.Context) error {
		page, err := r.c.Admin.VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: onehost.Org, ProjectId: p.name, PageSize: 1, Filter: "state = CREATING"})
		if err == nil && len(page.GetVms()) > 0 {
			err = errors.New("one is CREATING")
		}
		return err
	})
}

// walk lists all VMs of every project and stores the request paths of the full pages in project.pages. It returns an
// error if a project has no full page.
func (r *recorded) walk(ctx context.Context) error {
	for _, p := range r.projects {
		p.pages = nil
		for token := ""; ; {
			path := "/api/v1/vms"
			if token != "" {
				path += "?page_token=" + url.QueryEscape(token)
			}
			var page struct {
				VMs  []json.RawMessage
				Next string `json:"next_page_token"`
			}
			if err := p.rest[0].Call(ctx, "GET", path, nil, &page); err != nil {
				return err
			}
			if len(page.VMs) == 100 {
				p.pages = append(p.pages, path)
			}
			if token = page.Next; token == "" {
				break
			}
		}
		if len(p.pages) == 0 {
			return errors.New("no list has a page of 100")
		}
	}
	return nil
}

// calls returns n requests, sent to the members in rotation. Of each hundred requests, getsOf100 are gets and
// listsOf100 are lists, in random order.
func (r *recorded) calls(n int) ([]openloop.Call, error) {
	var out []openloop.Call
	for len(out) < n {
		hundred := make([]string, 0, 100)
		for i := range 100 {
			switch {
			case i < getsOf100:
				hundred = append(hundred, "get")
			case i < getsOf100+listsOf100:
				hundred = append(hundred, "list")
			default:
				hundred = append(hundred, "create")
			}
		}
		r.random.Shuffle(len(hundred), func(i, j int) { hundred[i], hundred[j] = hundred[j], hundred[i] })
		for _, kind := range hundred {
			c, err := r.call(kind, len(out)%3)
			if err != nil {
				return nil, err
			}
			out = append(out, c)
		}
	}
	return out[:n], nil
}

func (r *recorded) call(kind string, member int) (openloop.Call, error) {
	p := r.projects[r.random.IntN(len(r.projects))]
	method, path, body, want := "GET", "", "", http.StatusOK
	switch kind {
	case "get":
		path = "/api/v1/vms/" + p.vms[r.random.IntN(len(p.vms))]
	case "list":
		path = p.pages[r.random.IntN(len(p.pages))]
	default:
		text, err := json.Marshal(vmBody(r.name(), r.image))
		if err != nil {
			return openloop.Call{}, err
		}
		method, path, body, want = "POST", "/api/v1/vms", string(text), http.StatusCreated
	}
	rest := p.rest[member]
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n", method, path, rest.Host, rest.Token)
	if body != "" {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	b.WriteString("\r\n" + body)
	return openloop.Call{Kind: kind, Target: member, Request: []byte(b.String()), Want: want}, nil
}

// cpuUsed holds CPU times during runs, in seconds: those of the members, the load generator, the simulated hosts and
// the whole machine (the field all). The field wall is the duration of the runs.
type cpuUsed struct{ members, generator, hosts, all, wall float64 }

// run sends the load once, for about length. It adds the latencies to *into and the CPU times to *used.
func (r *recorded) run(ctx context.Context, length time.Duration, into *openloop.Result, used *cpuUsed) error {
	if err := r.walk(ctx); err != nil {
		return err
	}
	calls, err := r.calls(int(length.Seconds() * r.rate))
	if err != nil {
		return err
	}
	members, own, hosts, all, began := cpuOf(r.c.Members()...), ownCPU(), cpuOf(r.fleet.pids()...), busyCPU(), time.Now()
	got, err := openloop.Run(ctx, openloop.Options{Targets: r.c.Addresses(":8084"), Conns: conns, Rate: r.rate, Calls: calls})
	used.wall += time.Since(began).Seconds()
	used.all += busyCPU() - all
	used.members += cpuOf(r.c.Members()...) - members
	used.generator += ownCPU() - own
	used.hosts += cpuOf(r.fleet.pids()...) - hosts
	for _, kind := range slices.Sorted(maps.Keys(got.Latencies)) {
		report.Say("load: %s p50 %s p99 %s of %d, %d failed; sent late p99 %s; load %s", kind,
			ms(figure.Quantile(got.Latencies[kind], 0.5)), ms(figure.Quantile(got.Latencies[kind], 0.99)), len(got.Latencies[kind]), got.Failed[kind],
			ms(figure.Quantile(got.Late, 0.99)), usage.Load())
	}
	if got.First != nil {
		report.Say("first failure: %v", got.First)
	}
	into.Add(got)
	return err
}

// measure runs the load alternately with all hosts working and with one host stopped, and adds rows with the results.
func (r *recorded) measure(ctx context.Context, b *bench) error {
	var warm, well, hanging openloop.Result
	var unused, used, usedHanging cpuUsed
	if err := r.run(ctx, 5*time.Second, &warm, &unused); err != nil {
		return err
	}
	if b.profiles != "" {
		stop := r.perf(ctx, b)
		defer stop()
	}
	for range pairs {
		if err := b.Calm.Await(ctx); err != nil {
			return err
		}
		if err := r.run(ctx, b.load, &well, &used); err != nil {
			return err
		}
		if err := b.Calm.Await(ctx); err != nil {
			return err
		}
		if err := r.hang(ctx, func() error { return r.run(ctx, b.load, &hanging, &usedHanging) }); err != nil {
			return err
		}
	}
	r.rows(b, "all hosts well", &well, used)
	r.rows(b, "one host hangs (SIGSTOP)", &hanging, usedHanging)
	for _, kind := range []string{"get", "list"} {
		a, h := figure.Quantile(well.Latencies[kind], 0.99), figure.Quantile(hanging.Latencies[kind], 0.99)
		b.row(figure.Row{What: "p99 of " + kind + " with one host hanging, against all well", Ours: ms(h), Peer: ms(a),
			Value: h.Seconds() / a.Seconds(), AtMost: stoppedAtMost, Unit: "×"})
	}
	return nil
}

// hang stops the process of one simulated host with SIGSTOP, runs f, continues the process, and waits until the host is
// READY.
func (r *recorded) hang(ctx context.Context, f func() error) error {
	p := r.fleet.procs[0].Process
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	err := f()
	err = errors.Join(err, p.Signal(syscall.SIGCONT))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err = r.c.Admin.AwaitNode(ctx, hostName(0))
	return err
}

func (r *recorded) rows(b *bench, when string, got *openloop.Result, used cpuUsed) {
	for _, k := range []struct {
		kind   string
		atMost float64
	}{{"get", getAtMost}, {"list", listAtMost}, {"create", 0}} {
		l := got.Latencies[k.kind]
		p99 := figure.Quantile(l, 0.99)
		row := figure.Row{
			What: fmt.Sprintf("%s, %d VMs, %.0f requests/s, %s", map[string]string{"get": "get a VM", "list": "list 100 VMs", "create": "create a VM"}[k.kind], b.vms, r.rate, when),
			Ours: fmt.Sprintf("p50 %s, p99 %s", ms(figure.Median(l)), ms(p99)),
			Note: fmt.Sprintf("%d answers, %d failed; slowest %s", len(l), got.Failed[k.kind], ms(figure.Quantile(l, 1))),
		}
		if k.atMost > 0 {
			row.Value, row.AtMost, row.Unit = float64(p99.Microseconds())/1000, k.atMost, "ms"
		}
		b.row(row)
	}
	b.row(figure.Row{What: "CPU under that load, " + when, Ours: fmt.Sprintf("members %.0f %% of a core", used.members/used.wall*100),
		Note: fmt.Sprintf("generator %.0f %%, %d simulated hosts %.0f %%, all else on the machine %.0f %%; requests sent late: p50 %s, p99 %s",
			used.generator/used.wall*100, r.fleet.hosts, used.hosts/used.wall*100,
			max(0, used.all-used.members-used.generator-used.hosts)/used.wall*100, ms(figure.Median(got.Late)), ms(figure.Quantile(got.Late, 0.99)))})
}

// perf profiles the members with `perf record` until stop is called. If perf cannot be started, it prints the reason
// and returns a stop that does nothing.
func (r *recorded) perf(ctx context.Context, b *bench) (stop func()) {
	var pids []string
	for _, pid := range r.c.Members() {
		pids = append(pids, fmt.Sprint(pid))
	}
	cmd := exec.CommandContext(ctx, "perf", "record", "-F", "199", "-g", "-o", b.profiles, "-p", strings.Join(pids, ","))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		report.Say("no profile: %v", err)
		return func() {}
	}
	var once sync.Once
	return func() {
		once.Do(func() {
			_ = cmd.Process.Signal(syscall.SIGINT)
			_ = cmd.Wait() // its error only reports the SIGINT
		})
	}
}
