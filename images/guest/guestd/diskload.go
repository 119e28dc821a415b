package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// loadModes are the values of diskload's argument MODE.
var loadModes = []string{"read", "write", "randread", "randwrite"}

// maxBlock is the largest BLOCK of diskload, in bytes.
const maxBlock = 1 << 20

// diskLoad is a load on a block device: count operations of block bytes each, one after the other, within the first
// span bytes of the device, without the page cache of the guest.
type diskLoad struct {
	dev, mode          string
	block, count, span int64
}

// diskLoadCommand reads or writes COUNT blocks of BLOCK bytes of the device DEV and prints one line:
//
//	ops=1000 bytes=4096000 us=512345
//
// us is the elapsed time in microseconds. The modes read and write go through the first SPAN bytes in order, and begin
// again at their end; write flushes the device once at the end. The modes randread and randwrite choose the blocks at
// random, always the same ones; randwrite flushes the device after each block. Writes destroy the content of the
// device.
func diskLoadCommand(args []string, _ io.Reader, out io.Writer) error {
	l, err := parseDiskLoad(args)
	if err != nil {
		return err
	}
	took, err := l.run()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "ops=%d bytes=%d us=%d\n", l.count, l.count*l.block, took.Microseconds())
	return err
}

func parseDiskLoad(args []string) (l diskLoad, err error) {
	if len(args) != 5 {
		return l, errUsage
	}
	l.dev, l.mode = args[0], args[1]
	if !slices.Contains(loadModes, l.mode) {
		return l, fmt.Errorf("%w: the mode %q is none of %v", errUsage, l.mode, loadModes)
	}
	for i, to := range []*int64{&l.block, &l.count, &l.span} {
		if *to, err = strconv.ParseInt(args[2+i], 10, 64); err != nil || *to < 1 {
			return l, fmt.Errorf("%w: %q is no positive number", errUsage, args[2+i])
		}
	}
	if l.block > maxBlock || l.block%4096 != 0 || l.span < l.block {
		return l, fmt.Errorf("%w: BLOCK is a multiple of 4096, at most %d and at most SPAN", errUsage, maxBlock)
	}
	return l, nil
}

// offsets returns a function that returns the offset of the next operation in bytes.
func (l diskLoad) offsets() func() int64 {
	blocks := l.span / l.block
	if l.mode == "read" || l.mode == "write" {
		next := int64(-1)
		return func() int64 { next++; return next % blocks * l.block }
	}
	random := rand.New(rand.NewPCG(1, 2)) // a fixed seed, so that two runs make the same operations
	return func() int64 { return random.Int64N(blocks) * l.block }
}

// run makes the operations and returns the elapsed time.
func (l diskLoad) run() (took time.Duration, err error) {
	write := l.mode == "write" || l.mode == "randwrite"
	mode := os.O_RDONLY
	if write {
		mode = os.O_WRONLY
	}
	f, err := extent{dev: l.dev, len: l.span}.open(mode)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	// The memory is mapped, because direct I/O needs aligned buffers.
	buf, err := unix.Mmap(-1, 0, int(l.block), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return 0, fmt.Errorf("allocate buffer: %w", err)
	}
	defer func() { _ = unix.Munmap(buf) }() // cannot fail for a slice that Mmap returned
	for i := range buf {
		buf[i] = byte(i*7 + i>>8) // not zeros, for which a file system might allocate nothing
	}
	next := l.offsets()
	began := time.Now()
	for range l.count {
		if write {
			_, err = f.WriteAt(buf, next())
		} else {
			_, err = f.ReadAt(buf, next())
		}
		if err == nil && l.mode == "randwrite" {
			err = f.Sync()
		}
		if err != nil {
			return 0, err
		}
	}
	if l.mode == "write" {
		err = f.Sync()
	}
	return time.Since(began), err
}
