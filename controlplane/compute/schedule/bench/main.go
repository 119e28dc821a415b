// Command bench measures placements per second with the index of package schedule, and with a naive scan of all hosts,
// in clouds of 100, 1,000 and 10,000 hosts. It prints a table. The clouds are random but always the same.
//
// A placement is one call of Place, and the allocation on the chosen host, which is then freed again, so that the
// clouds stay half full. One placement in four belongs to a soft anti-affinity group or spreads over racks.
package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/compute/schedule/scheduletest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func main() {
	span := flag.Duration("time", 3*time.Second, "time for each measurement")
	flag.Parse()
	fmt.Printf("CPUs: %d\n\n", runtime.GOMAXPROCS(0))
	fmt.Println("| hosts | index, one goroutine | index, a goroutine for each CPU | naive scan, one goroutine |")
	fmt.Println("|---|---|---|---|")
	for _, n := range []int{100, 1_000, 10_000} {
		one := perSecond(*span, 1, newIndexed(n))
		all := perSecond(*span, runtime.GOMAXPROCS(0), newIndexed(n))
		naive := perSecond(*span, 1, newScanned(n))
		fmt.Printf("| %d | %.0f/s | %.0f/s | %.0f/s |\n", n, one, all, naive)
	}
}

// perSecond calls place in the given number of goroutines for a time, and returns the number of calls per second.
func perSecond(span time.Duration, goroutines int, place func(rng *rand.Rand)) float64 {
	var wg sync.WaitGroup
	counts := make([]int, goroutines)
	began := time.Now()
	for g := range goroutines {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for time.Since(began) < span {
				place(rng)
				counts[g]++
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	total := 0
	for _, n := range counts {
		total += n
	}
	return float64(total) / took.Seconds()
}

// newHosts returns n hosts that are about half full.
func newHosts(n int) []scheduletest.Host {
	rng := rand.New(rand.NewPCG(uint64(n), 0))
	hosts := make([]scheduletest.Host, n)
	for i := range hosts {
		hosts[i] = scheduletest.RandomHost(rng, i)
	}
	return hosts
}

// request returns a request of a small VM, of which some have soft rules.
func request(rng *rand.Rand, hosts []scheduletest.Host) *schedule.Request {
	vcpus := uint32(1) << rng.IntN(3)
	r := &schedule.Request{
		VM: cloud.VMID(fmt.Sprintf("%016x", rng.Uint64())), Now: scheduletest.Now, Architecture: cloud.X8664,
		Need: cloud.Capacity{VCPUs: vcpus, MemoryMiB: uint64(vcpus) << 11, StorageGiB: 10},
	}
	members := map[cloud.NodeID]int{}
	switch rng.IntN(8) {
	case 0:
		r.AntiAffinitySoft = members
	case 1:
		r.SpreadLabel, r.Spread = "rack", members
	default:
		return r
	}
	for range 10 {
		members[hosts[rng.IntN(len(hosts))].Node.ID]++
	}
	return r
}

// newIndexed returns a function that places a VM by the index of a cloud of n hosts, and frees it.
func newIndexed(n int) func(*rand.Rand) {
	hosts := newHosts(n)
	ix := schedule.NewIndex()
	for i := range hosts {
		ix.Put(&hosts[i].Node, hosts[i].LastSeen)
	}
	var mu sync.RWMutex // as in package node
	return func(rng *rand.Rand) {
		r := request(rng, hosts)
		mu.RLock()
		d := ix.Place(r)
		mu.RUnlock()
		if d.Node == "" {
			fail("no host fits")
		}
		mu.Lock()
		defer mu.Unlock()
		ix.Allocate(d.Node, r.Need)
		ix.Free(d.Node, r.Need)
	}
}

// newScanned is newIndexed with the naive scan.
func newScanned(n int) func(*rand.Rand) {
	hosts := newHosts(n)
	return func(rng *rand.Rand) {
		if id, _ := scheduletest.Scan(hosts, request(rng, hosts)); id == "" {
			fail("no host fits")
		}
	}
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, "bench:", text)
	os.Exit(1)
}
