package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
)

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// fewer returns the number of rounds of the parts other than io.
func (b *bench) fewer() int { return min(b.rounds, b.size.maxRounds) }

// cloned holds how long it took until a volume was attached, and until the guest had read its first bytes.
type cloned struct{ attached, read time.Duration }

// measureClone measures how long it takes until a running guest has read the first bytes of a new volume that was made
// from an image. A first clone, which does not count, makes the host fetch the image.
func measureClone(ctx context.Context, s *site) error {
	p, err := s.pair(ctx, 0)
	if err != nil {
		return err
	}
	if _, err := s.cloneOurs(ctx, p.ours); err != nil {
		return err
	}
	return s.measureClones(ctx, "clone",
		func(int) (cloned, error) { return s.cloneOurs(ctx, p.ours) },
		func(round int) (cloned, error) { return s.cloneByHand(ctx, p.hand, round) },
	)
}

// measureClones measures two ways of cloning in turn. prefix begins the IDs of the lines.
func (s *site) measureClones(ctx context.Context, prefix string, ours, byHand func(round int) (cloned, error)) error {
	turn := func(isPeer bool, clone func(int) (cloned, error)) func(int) error {
		return func(round int) error {
			took, err := clone(round)
			if err != nil {
				return err
			}
			s.results.Add(prefix+" attached", isPeer, milliseconds(took.attached))
			s.results.Add(prefix+" read", isPeer, milliseconds(took.read))
			return nil
		}
	}
	return s.InTurn(ctx, s.fewer(), turn(false, ours), turn(true, byHand))
}

func (s *site) cloneOurs(ctx context.Context, m *machine) (took cloned, err error) {
	began := time.Now()
	volume, err := s.createVolume(ctx, s.images.Disk)
	if err != nil {
		return took, err
	}
	if err := s.attach(ctx, m, "clone", volume); err != nil {
		return took, err
	}
	took.attached = time.Since(began)
	if err := m.awaitRead(ctx, "vdb"); err != nil {
		return took, err
	}
	took.read = time.Since(began)
	return took, errors.Join(s.detach(ctx, m, "clone"), s.deleteVolume(ctx, volume))
}

func (s *site) cloneByHand(ctx context.Context, m *machine, round int) (took cloned, err error) {
	b := backing{path: filepath.Join(m.dir, fmt.Sprintf("clone-%d.qcow2", round)), base: filepath.Join(s.guest, "disk.qcow2")}
	began := time.Now()
	if _, _, err := run(ctx, nil, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", b.base, b.path, "1G"); err != nil {
		return took, err
	}
	if err := m.plug(ctx, 1, b); err != nil {
		return took, err
	}
	took.attached = time.Since(began)
	if err := m.awaitRead(ctx, "vdb"); err != nil {
		return took, err
	}
	took.read = time.Since(began)
	return took, errors.Join(m.unplug(ctx, 1, b), os.Remove(b.path))
}

// measureAttach attaches many volumes at once to several guests. In a round it does so twice: with new volumes, whose
// files are made then, and with the same volumes after they were detached.
func measureAttach(ctx context.Context, s *site) error {
	var ours, hand []*machine
	for i := range s.size.attached / hotPlugs {
		p, err := s.pair(ctx, i)
		if err != nil {
			return err
		}
		ours, hand = append(ours, p.ours), append(hand, p.hand)
	}
	s.results.Note("attach", "until all calls have returned; the guests then have the devices")
	return s.InTurn(ctx, s.fewer(),
		func(int) error { return s.attachOurs(ctx, ours) },
		func(int) error { return s.attachByHand(ctx, hand) },
	)
}

// forEach calls do at once for each disk of each machine, and returns how long it took until all calls had returned.
// The number of a disk is from 0, and slots are from 1 to hotPlugs.
func forEach(ctx context.Context, machines []*machine, do change) (time.Duration, error) {
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for i, m := range machines {
		for slot := 1; slot <= hotPlugs; slot++ {
			group.Go(func() error { return do(ctx, m, i*hotPlugs+slot-1, slot) })
		}
	}
	err := group.Wait()
	return time.Since(began), err
}

// change attaches or detaches a disk. Its parameters are those of the function do of forEach.
type change func(ctx context.Context, m *machine, number, slot int) error

// plugAndUnplug attaches disks at once, and then detaches all of them at once. Both times are figures: the first one of
// the line with the ID line, the second one of the line "detach".
func (s *site) plugAndUnplug(ctx context.Context, machines []*machine, line string, isPeer bool, plug, unplug change) error {
	took, err := forEach(ctx, machines, plug)
	if err != nil {
		return err
	}
	s.results.Add(line, isPeer, milliseconds(took))
	if took, err = forEach(ctx, machines, unplug); err != nil {
		return err
	}
	s.results.Add("detach", isPeer, milliseconds(took))
	return nil
}

func (s *site) attachOurs(ctx context.Context, machines []*machine) error {
	var volumes []string
	for range len(machines) * hotPlugs {
		v, err := s.createVolume(ctx, "")
		if err != nil {
			return err
		}
		volumes = append(volumes, v)
	}
	attach := func(ctx context.Context, m *machine, number, slot int) error {
		return s.attach(ctx, m, "hot-"+strconv.Itoa(slot), volumes[number])
	}
	detach := func(ctx context.Context, m *machine, _, slot int) error {
		return s.detach(ctx, m, "hot-"+strconv.Itoa(slot))
	}
	for _, line := range []string{"attach", "attach again"} {
		if err := s.plugAndUnplug(ctx, machines, line, false, attach, detach); err != nil {
			return err
		}
	}
	for _, v := range volumes {
		if err := s.deleteVolume(ctx, v); err != nil {
			return err
		}
	}
	return nil
}

func (s *site) attachByHand(ctx context.Context, machines []*machine) error {
	file := func(m *machine, slot int) backing {
		return backing{path: filepath.Join(m.dir, fmt.Sprintf("hot-%d.raw", slot))}
	}
	plug := func(ctx context.Context, m *machine, _, slot int) error {
		f := file(m, slot)
		if err := makeRaw(f.path, 1<<30); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		return m.plug(ctx, slot, f)
	}
	unplug := func(ctx context.Context, m *machine, _, slot int) error { return m.unplug(ctx, slot, file(m, slot)) }
	for _, line := range []string{"attach", "attach again"} {
		if err := s.plugAndUnplug(ctx, machines, line, true, plug, unplug); err != nil {
			return err
		}
	}
	for _, m := range machines {
		for slot := 1; slot <= hotPlugs; slot++ {
			if err := os.Remove(file(m, slot).path); err != nil {
				return err
			}
		}
	}
	return nil
}

// sectorsPerGiB is the number of sectors of 512 bytes in a GiB.
const sectorsPerGiB = 1 << 21

// measureResize grows a disk of a running guest by 1 GiB in each round.
func measureResize(ctx context.Context, s *site) (err error) {
	p, err := s.pair(ctx, 0)
	if err != nil {
		return err
	}
	volume, err := s.createVolume(ctx, "")
	if err != nil {
		return err
	}
	if err := s.attach(ctx, p.ours, "grown", volume); err != nil {
		return err
	}
	file := backing{path: filepath.Join(p.hand.dir, "grown.raw")}
	if err := makeRaw(file.path, 1<<30); err != nil {
		return err
	}
	if err := p.hand.plug(ctx, 1, file); err != nil {
		return err
	}
	measure := func(m *machine, isPeer bool, gib int, grow func() error) error {
		if err := m.awaitSectors(ctx, "vdb", int64(gib-1)*sectorsPerGiB); err != nil {
			return err
		}
		began := time.Now()
		if err := grow(); err != nil {
			return err
		}
		if err := m.awaitSectors(ctx, "vdb", int64(gib)*sectorsPerGiB); err != nil {
			return err
		}
		s.results.Add("resize", isPeer, milliseconds(time.Since(began)))
		return nil
	}
	if err := s.InTurn(ctx, s.fewer(), func(round int) error {
		return measure(p.ours, false, round+2, func() error {
			_, err := s.cloud.Admin.Volumes.ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{
				OrgId: onehost.Org, ProjectId: project, VolumeId: volume, SizeGib: uint64(round + 2),
			})
			return err
		})
	}, func(round int) error {
		return measure(p.hand, true, round+2, func() error { return p.hand.grow(ctx, 1, int64(round+2)<<30) })
	}); err != nil {
		return err
	}
	return errors.Join(s.detach(ctx, p.ours, "grown"), s.deleteVolume(ctx, volume), p.hand.unplug(ctx, 1, file))
}
