package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// sick is a cloud whose members may have small disks of their own, which a test can fill or make fail. It also writes
// keys, and knows which of them were acknowledged.
type sick struct {
	*world
	ctx   context.Context
	disks map[int]*lab.Disk

	mu     sync.Mutex
	codes  map[int]chan int // the exit codes of each member's processes that have ended
	acked  map[string]int   // the number of the last acknowledged write, by key
	number int              // the number of the last write that was tried
	count  int              // how many writes were acknowledged
}

// newSick starts three members with additional flags. Each member with an entry in the map mib has its own disk of that
// size in MiB. Without other flags, the members accept writes until the disk is full.
func newSick(t *testing.T, mib map[int]int, flags ...string) *sick {
	s := &sick{disks: map[int]*lab.Disk{}, codes: map[int]chan int{}, acked: map[string]int{}}
	s.world = newWorld(t, func(w *world) {
		w.trio.Extra = append([]string{"--limits-disk-reserve=-1"}, flags...)
		for id := range w.trio.Members {
			s.codes[id] = make(chan int, 20)
		}
		w.trio.Ended = func(id, code int) { s.codes[id] <- code }
		for id, size := range mib {
			d, err := lab.NewDisk(w.trio.DataDir(id), w.dir.Path(fmt.Sprint("disk-", id)), size)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, d.Remove()) })
			s.disks[id] = d
		}
	})
	s.ctx = s.context(3 * time.Minute)
	return s
}

func (s *sick) client(members ...int) *clientv3.Client {
	var endpoints []string
	for _, m := range members {
		endpoints = append(endpoints, s.trio.Members[m]+":50051")
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	require.NoError(s.t, err)
	s.t.Cleanup(func() { c.Close() })
	return c
}

// occupy writes zeros to a file on the disk of member 1 until at most about room bytes of that disk are free, and no more
// than 1 MiB has become free for two seconds.
func (s *sick) occupy(path string, room int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	quiet := time.Now()
	return lab.Until(s.ctx, "no more space becomes free", func(context.Context) error {
		free, err := s.disks[1].Free()
		if err != nil {
			return err
		}
		if free >= room+1<<20 {
			s.t.Logf("%d MiB above %d MiB are free", (free-room)>>20, room>>20)
			quiet = time.Now()
			_, err := f.Write(make([]byte, free-room))
			return cmp.Or(err, errors.New("the free space has just been occupied"))
		}
		if time.Since(quiet) < 2*time.Second {
			return fmt.Errorf("the last space was occupied %s ago", time.Since(quiet))
		}
		return nil
	})
}

// write puts values of size random bytes from four goroutines until stop is called, and stores in s which writes were
// acknowledged.
func (s *sick) write(c *clientv3.Client, size int) (stop func()) {
	ctx, cancel := context.WithCancel(s.ctx)
	var work sync.WaitGroup
	for i := range 4 {
		work.Go(func() {
			for ctx.Err() == nil {
				s.mu.Lock()
				s.number++
				n := s.number
				s.mu.Unlock()
				key := fmt.Sprintf("fill/%d/%d", i, n%40)
				value := make([]byte, size)
				rand.Read(value)
				head := fmt.Sprintf("%08d", n)
				limited, cancel := context.WithTimeout(ctx, 10*time.Second)
				_, err := c.Put(limited, key, head+string(value))
				cancel()
				if err == nil {
					s.mu.Lock()
					s.acked[key] = n
					s.count++
					s.mu.Unlock()
				}
			}
		})
	}
	return func() { cancel(); work.Wait() }
}

// acknowledged waits until n further writes are acknowledged.
func (s *sick) acknowledged(n int) {
	s.t.Helper()
	s.mu.Lock()
	want := s.count + n
	s.mu.Unlock()
	require.NoError(s.t, lab.Until(s.ctx, fmt.Sprint(n, " keys are acknowledged"), func(context.Context) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.count < want {
			return fmt.Errorf("%d are missing", want-s.count)
		}
		return nil
	}))
}

// ended waits until a member has ended, and returns its exit code and its complete log.
func (s *sick) ended(id int) (code int, log string) {
	s.t.Helper()
	select {
	case code = <-s.codes[id]:
	case <-s.ctx.Done():
		s.t.Fatalf("member %d still runs", id)
	}
	text, err := os.ReadFile(s.dir.LogFile(s.trio.Name(id)))
	require.NoError(s.t, err)
	return code, string(text)
}

// whole waits until all members have the same data, and checks that this data includes all acknowledged writes.
func (s *sick) whole() {
	s.t.Helper()
	require.NoError(s.t, lab.Until(s.ctx, "all members have the same data", func(ctx context.Context) error {
		c := s.client(1)
		seen := map[string]bool{}
		got, err := c.Get(ctx, "fill/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			return err
		}
		for id := range s.trio.Members {
			one, err := c.HashKV(ctx, s.trio.Members[id]+":50051", got.Header.Revision)
			if err != nil {
				return err
			}
			seen[fmt.Sprint(one.Hash, one.CompactRevision)] = true
		}
		if len(seen) != 1 {
			return fmt.Errorf("hashes %v", seen)
		}
		return nil
	}))
	c := s.client(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, n := range s.acked {
		got, err := c.Get(s.ctx, key)
		require.NoError(s.t, err)
		require.Len(s.t, got.Kvs, 1, "the acknowledged key %s must exist", key)
		require.GreaterOrEqual(s.t, string(got.Kvs[0].Value[:8]), fmt.Sprintf("%08d", n), key)
	}
}

// lead makes a member the leader of the raft group of the key-value store.
func (s *sick) lead(id int) {
	s.t.Helper()
	if s.kvLeader(s.ctx, 1, 2, 3) != id {
		s.keys(s.ctx, id%3+1, 200, http.MethodPost, "/api/v1/cluster/leader/transfer", map[string]int{"target_id": id})
		require.Equal(s.t, id, s.kvLeader(s.ctx, 1, 2, 3))
	}
}

// goesOn checks that ten keys can be written through the given members.
func (s *sick) goesOn(members ...int) {
	s.t.Helper()
	c := s.client(members...)
	for i := range 10 {
		key := fmt.Sprint("on/", i)
		require.NoError(s.t, lab.Until(s.ctx, key+" is written", func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			_, err := c.Put(ctx, key, "v")
			return err
		}))
	}
}

// back starts the given members again with the flags of newSick, and waits until all running members are ready.
func (s *sick) back(ids ...int) {
	s.t.Helper()
	for _, id := range ids {
		require.NoError(s.t, s.trio.Start(id))
	}
	s.ready()
}

// last waits until a member has ended, checks that it did so with exit code 1 and without a panic, empties its log, and
// returns the last line of that log.
func (s *sick) last(id int) string {
	s.t.Helper()
	code, text := s.ended(id)
	require.Equal(s.t, 1, code)
	require.NotContains(s.t, text, "goroutine ", "the member must not panic")
	require.NotContains(s.t, text, "level=ERROR")
	lines := strings.Split(strings.TrimSpace(text), "\n")
	require.NoError(s.t, os.Truncate(s.dir.LogFile(s.trio.Name(id)), 0))
	return lines[len(lines)-1]
}

// TestDiskRunsFull fills a follower's disk with a foreign file, then the leader's disk with writes, then all disks. It
// checks that a member without space ends with that reason and the others accept writes. With space again, each member
// must start, and all must have the same data with all acknowledged writes.
func TestDiskRunsFull(t *testing.T) {
	s := newSick(t, map[int]int{1: 260, 2: 900, 3: 900})
	full := func(id int) {
		t.Helper()
		line := s.last(id)
		require.Contains(t, line, "the disk of "+s.trio.DataDir(id)+" is full")
		require.Contains(t, line, "no space left on device")
		require.Contains(t, line, "make room there")
	}

	s.lead(2)
	stop := s.write(s.client(1, 2, 3), 1<<10)
	s.acknowledged(20)
	foreign := filepath.Join(s.trio.DataDir(1), "foreign")
	require.NoError(t, s.disks[1].Fill(foreign))
	full(1)
	stop()
	s.goesOn(2, 3)
	require.NoError(t, os.Remove(foreign))
	s.back(1)
	s.whole()

	s.lead(1)
	stop = s.write(s.client(1, 2, 3), 256<<10)
	full(1)
	stop()
	s.goesOn(2, 3)
	require.NoError(t, s.disks[1].Grow(600))
	s.back(1)
	s.whole()

	for id, d := range s.disks {
		require.NoError(t, d.Fill(filepath.Join(s.trio.DataDir(id), "foreign")))
	}
	// Two members must end because their writes fail. The third then has no quorum, and writes nothing.
	stop = s.write(s.client(1, 2, 3), 256<<10)
	var over []int
	require.NoError(t, lab.Until(s.ctx, "two members have ended", func(context.Context) error {
		over = nil
		for id, codes := range s.codes {
			if len(codes) > 0 {
				over = append(over, id)
			}
		}
		if len(over) < 2 {
			return fmt.Errorf("only %d members have ended", over)
		}
		return nil
	}))
	stop()
	for _, id := range over {
		full(id)
	}
	require.NoError(t, s.trio.StopAll())
	for _, codes := range s.codes {
		for len(codes) > 0 {
			<-codes
		}
	}
	// A member without space must not start.
	require.NoError(t, s.trio.Start(over[0]))
	full(over[0])
	// Grow the disks too, because the writes may have used most of the space.
	for id, d := range s.disks {
		require.NoError(t, os.Remove(filepath.Join(s.trio.DataDir(id), "foreign")))
		require.NoError(t, d.Grow(2000))
	}
	s.back(1, 2, 3)
	s.goesOn(1, 2, 3)
	s.whole()
}

// TestDiskFails makes a follower's disk fail with I/O errors, then the leader's. It checks that the member ends with
// that reason, that the others accept writes, and that the member starts again when its disk works, with no
// acknowledged write lost.
func TestDiskFails(t *testing.T) {
	s := newSick(t, map[int]int{1: 300})
	for _, leader := range []int{2, 1} {
		s.lead(leader)
		stop := s.write(s.client(1, 2, 3), 4<<10)
		s.acknowledged(50)
		require.NoError(t, s.disks[1].Fail())
		line := s.last(1)
		require.Contains(t, line, "the disk of "+s.trio.DataDir(1)+" fails")
		require.Regexp(t, "controlplane-1/[a-z/0-9.]+: input/output error", line)
		require.Contains(t, line, "trivet cluster replace 1")
		s.goesOn(2, 3)
		s.acknowledged(50)
		stop()
		require.NoError(t, s.disks[1].Repair())
		s.back(1)
		s.whole()
	}
}

// replace replaces a stopped member by a new one with an empty directory, with `trivet cluster replace`, as an operator
// would. It waits until the new member is a voter.
func (s *sick) replace(id int) {
	s.t.Helper()
	home := s.t.TempDir()
	token := filepath.Join(home, "token")
	require.NoError(s.t, os.WriteFile(token, []byte(s.adminToken), 0o600))
	out, errs, code := s.trivet(s.ctx, home, "--token-file", token, "cluster", "replace", fmt.Sprint(id))
	require.Zero(s.t, code, out+errs)
	require.NoError(s.t, os.RemoveAll(s.trio.DataDir(id)))
	require.NoError(s.t, s.trio.Prepare())
	s.back(id)
	s.voters(1, 1, 2, 3)
}

// TestDataIsDamaged flips one bit in the log of a stopped member, and then in its tables. It checks that the member
// does not start and that its message names the damaged directory and the remedy, and that after the remedy all members
// have the same data.
func TestDataIsDamaged(t *testing.T) {
	s := newSick(t, nil)
	s.voters(1, 1, 2, 3)
	stop := s.write(s.client(1, 2, 3), 300)
	s.acknowledged(300)
	stop()
	for _, of := range []struct{ files, says string }{
		{"raft/log/*.log", "controlplane-2/raft/log"},
		{"kv/*/*.sst", "controlplane-2/kv"},
	} {
		home := t.TempDir()
		token := filepath.Join(home, "token")
		require.NoError(t, os.WriteFile(token, []byte(s.adminToken), 0o600))
		// Make a backup, because that makes the member write its state to tables.
		_, errs, code := s.trivet(s.ctx, home, "--endpoint", "127.0.0.2", "--token-file", token, "cluster", "backup", filepath.Join(home, "backup"))
		require.Zero(t, code, errs)
		require.NoError(t, s.dir.Stop(s.trio.Name(2), 12*time.Second))
		require.Zero(t, <-s.codes[2])
		require.NoError(t, os.Truncate(s.dir.LogFile(s.trio.Name(2)), 0))

		file := largest(t, filepath.Join(s.trio.DataDir(2), of.files))
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		used := len(bytes.TrimRight(text, "\x00"))
		require.NoError(t, lab.Flip(file, int64(used/3)))
		require.NoError(t, s.trio.Start(2))
		code, line := s.ended(2)
		require.Equal(t, 1, code)
		require.NotContains(t, line, "goroutine ")
		require.Contains(t, line, "the data of this member is damaged")
		require.Contains(t, line, of.says)
		require.Contains(t, line, "trivet cluster replace 2")
		s.goesOn(1, 3)
		s.replace(2)
		s.whole()
	}
}

// largest returns the name of the largest file that matches a pattern, not counting zeros at its end.
func largest(t *testing.T, pattern string) (name string) {
	files, err := filepath.Glob(pattern)
	require.NoError(t, err)
	most := int64(-1)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		if used := int64(len(bytes.TrimRight(text, "\x00"))); used > most {
			most, name = used, file
		}
	}
	require.NotEmpty(t, name, "no file matches %s", pattern)
	return name
}
