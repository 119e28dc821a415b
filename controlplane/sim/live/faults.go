package live

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// injectFaults injects random faults for two to three minutes of virtual time.
func (f *fleet) injectFaults() {
	f.mu.Lock()
	if f.rng.IntN(3) > 0 {
		f.lateness = 10 + f.rng.IntN(50)
	}
	f.mu.Unlock()
	pace := time.Duration(1+f.rng.IntN(8)) * time.Second
	onlyHosts := f.rng.IntN(3) == 0
	for end := time.Now().Add(2*time.Minute + time.Duration(f.rng.IntN(60))*time.Second); time.Now().Before(end) && !f.failed(); {
		time.Sleep(time.Duration(f.rng.Int64N(int64(2 * pace))))
		if f.rng.IntN(4) == 0 && f.loseSource() {
			continue
		}
		if onlyHosts {
			f.loseHost()
			continue
		}
		f.fault()
	}
}

// loseHost takes a random host away for a time that is about as long as the lease of a host: its agent ends, it crashes,
// or no member reaches it. Sometimes a member is killed meanwhile.
func (f *fleet) loseHost() {
	h := f.hosts[f.rng.IntN(len(f.hosts))]
	switch f.rng.IntN(3) {
	case 0:
		f.happen("agents lost", h.stopAgent)
	case 1:
		f.happen("hosts lost", h.crash)
	default:
		f.happen("hosts unreachable", func() { f.isolate(h.name) })
	}
	time.Sleep(time.Duration(15+f.rng.IntN(45)) * time.Second)
	if f.rng.IntN(4) == 0 {
		s := f.slots[f.rng.IntN(len(f.slots))]
		f.happen("members killed", func() { f.kill(s, time.Second) })
	}
	time.Sleep(time.Duration(f.rng.IntN(30)) * time.Second)
	f.net.healNetwork()
	h.boot()
}

// loseSource takes away a host from which a guest is being migrated, before the switchover, for longer than the lease of a
// host. It returns false if there is no such host.
func (f *fleet) loseSource() bool {
	for _, h := range f.hosts {
		if !h.sends() {
			continue
		}
		if f.rng.IntN(2) == 0 {
			f.happen("sources lost before the switchover", h.crash)
		} else {
			f.happen("sources lost before the switchover", func() { f.isolate(h.name) })
		}
		time.Sleep(time.Duration(50+f.rng.IntN(40)) * time.Second)
		f.net.healNetwork()
		h.boot()
		return true
	}
	return false
}

// fault injects one random fault. With a probability of one half it also schedules a time at which all network cuts
// end.
func (f *fleet) fault() {
	s, o := f.slots[f.rng.IntN(len(f.slots))], f.slots[f.rng.IntN(len(f.slots))]
	h := f.hosts[f.rng.IntN(len(f.hosts))]
	soon := time.Duration(200+f.rng.IntN(8000)) * time.Millisecond
	if f.rng.IntN(6) == 0 {
		soon *= 8
	}
	// long is longer than the lease of a host, so that its VMs may start elsewhere.
	long := soon
	if f.rng.IntN(2) == 0 {
		long = time.Duration(45+f.rng.IntN(45)) * time.Second
	}
	switch n := f.rng.IntN(100); {
	case n < 18:
		f.happen("members killed", func() { f.kill(s, soon) })
	case n < 22:
		f.happen("all members killed", func() {
			for _, s := range f.slots {
				f.kill(s, soon)
			}
		})
	case n < 32:
		f.happen("members cut off", func() { f.isolate(s.name) })
	case n < 38:
		f.happen("links between members cut", func() { f.net.cut(s.name, o.name) })
	case n < 46:
		f.happen("hosts cut off", func() { f.isolate(h.name) })
	case n < 52:
		f.happen("links between hosts and members cut", func() { f.net.cut(h.name, s.name); f.net.cut(s.name, h.name) })
	case n < 68:
		f.happen("network healed", f.net.healNetwork)
	case n < 76:
		f.happen("agents restarted", func() {
			h.stopAgent()
			time.AfterFunc(long, h.boot)
		})
	case n < 80:
		f.happen("hosts restarted", func() {
			h.crash()
			time.AfterFunc(long, h.boot)
		})
	case n < 88:
		f.happen("bursts of creates", f.hurry)
	default:
		h.endRandomGuest()
	}
	if f.rng.IntN(2) == 0 {
		time.AfterFunc(soon, f.net.healNetwork)
	}
}

func (f *fleet) happen(what string, do func()) {
	f.trace.Add("fault: %s", what)
	f.count(what)
	do()
}

// kill kills a member's process. The member starts again when the duration given as later has passed.
func (f *fleet) kill(s *memberSlot, later time.Duration) {
	if s.current() == nil {
		return
	}
	if err := s.kill(f.rng); err != nil {
		f.fail("%s died badly: %v", s.name, err)
	}
	time.AfterFunc(later, func() { f.restartMember(s) })
}

// restartMember starts a member's process. It does nothing if the process already runs or the simulation is ending.
func (f *fleet) restartMember(s *memberSlot) {
	defer s.take()()
	if s.current() != nil || f.ended() {
		return
	}
	if err := s.start(); err != nil {
		f.fail("%v", err)
	}
}

func (f *fleet) isolate(who endpoint) {
	for _, s := range f.slots {
		if s.name != who {
			f.net.cut(who, s.name)
			f.net.cut(s.name, who)
		}
	}
	for _, h := range f.hosts {
		if h.name != who {
			f.net.cut(who, h.name)
			f.net.cut(h.name, who)
		}
	}
}

// heal ends all faults. It ends the network cuts, starts all members and agents that are down, and makes tenants begin
// no new calls.
func (f *fleet) heal() {
	f.trace.Add("peace")
	f.mu.Lock()
	f.last, f.lateness = true, 0
	f.mu.Unlock()
	f.net.healNetwork()
	for _, s := range f.slots {
		f.restartMember(s)
	}
	for _, h := range f.hosts {
		h.boot()
	}
}

// rush returns a channel that is closed when all tenants are to create a VM at the same moment, which is one of the
// faults.
func (f *fleet) rush() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rushed
}

func (f *fleet) hurry() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.rushed)
	f.rushed = make(chan struct{})
}

// lose crashes a host while the tenants make calls. It checks that every VM leaves its transient state at its deadline
// although the host is down, and that the cloud settles after the host has restarted.
func (f *fleet) lose(ctx context.Context) {
	h := f.hosts[f.rng.IntN(len(f.hosts))]
	f.count("long host outages")
	var work sync.WaitGroup
	for _, t := range f.tenants {
		work.Go(func() {
			for range 6 {
				t.once(ctx)
			}
		})
	}
	time.Sleep(time.Duration(f.rng.IntN(3000)) * time.Millisecond)
	h.crash()
	work.Wait()
	const longest = cloud.CreatingTime*time.Millisecond + 2*time.Minute
	if err := within(longest, func() error {
		if why := f.audit.transient(); why != "" {
			return errors.New(why)
		}
		return nil
	}); err != nil {
		f.fail("long after %s was lost: %v", h.name, err)
	}
	h.boot()
	f.settle("a lost host came back", f.audit.unsettled)
}
