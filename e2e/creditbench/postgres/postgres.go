// Package postgres runs PostgreSQL as the ledger that creditbench compares Trivet with: a new database cluster of
// Debian's package, reachable only over a unix socket. It stores the same data as Trivet's ledger (schema.sql) and
// executes each step, reserve or commit, in its own transaction.
//
// The settings are PostgreSQL's defaults, with fsync and synchronous_commit on, except those that an administrator
// would raise: shared_buffers, max_wal_size, max_connections. The locale is C. Unlike Trivet, the schema has no
// idempotency keys, no audit log, and no running sum of each type in each transaction, which favours PostgreSQL.
package postgres

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/trivet-cloud/trivet/e2e/creditbench/books"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

var (
	//go:embed schema.sql
	schema string
	//go:embed books.sql
	sums string
)

// owner is the name of the operating system's user that the server runs as, which Debian's package creates, and of the
// database's superuser.
const owner = "postgres"

const (
	name       = "postgres"
	maxCallers = 280
	stopWithin = 30 * time.Second
)

var settings = []string{
	"listen_addresses=", "fsync=on", "synchronous_commit=on", "shared_buffers=256MB", "max_wal_size=4GB", "max_connections=300",
}

// Settings returns the server's settings, other than the addresses that it listens on, as text for the report.
func Settings() string { return strings.Join(settings[1:], ", ") }

// Bank is a running PostgreSQL server with a ledger.
type Bank struct {
	dir  lab.Dir
	pool *pgxpool.Pool // nil until Connect succeeds
}

// Start creates a database cluster beneath dir with PostgreSQL's programs in bin, starts the server, waits until it
// serves, and creates the tables. The directories above dir must be accessible to all users. If Start returns an error,
// it has stopped the server.
func Start(ctx context.Context, dir, bin string) (_ *Bank, err error) {
	b := &Bank{dir: lab.Dir(dir)}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	uid, err := b.prepare()
	if err != nil {
		return nil, err
	}
	init := exec.CommandContext(ctx, "setpriv", "--reuid", strconv.Itoa(uid), "--regid", strconv.Itoa(uid), "--clear-groups", "--no-new-privs", "--",
		filepath.Join(bin, "initdb"), "--pgdata", b.data(), "--auth", "trust", "--no-locale", "--encoding", "UTF8", "--username", owner)
	init.Dir = dir
	if out, err := init.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("make a cluster: %w: %s", err, out)
	}
	args := []string{"-D", b.data(), "-c", "unix_socket_directories=" + b.socket()}
	for _, s := range settings {
		args = append(args, "-c", s)
	}
	if err := b.dir.Start(lab.Program{Name: name, Binary: filepath.Join(bin, "postgres"), Args: args, Work: dir, UID: uid}); err != nil {
		return nil, err
	}
	if err := lab.Until(ctx, "PostgreSQL serves", func(ctx context.Context) error {
		if b.dir.Running(name) == 0 {
			return errors.New("it has stopped; see " + b.dir.LogFile(name))
		}
		return b.Connect(ctx, 1)
	}); err != nil {
		text, _ := os.ReadFile(b.dir.LogFile(name))
		return nil, fmt.Errorf("%w: %s", err, text[max(0, len(text)-1000):])
	}
	if _, err := b.pool.Exec(ctx, schema); err != nil {
		return nil, fmt.Errorf("make tables: %w", err)
	}
	return b, nil
}

func (b *Bank) data() string   { return b.dir.Path("data") }
func (b *Bank) socket() string { return b.dir.Path("socket") }

// prepare creates the server's directories, which only its user can access, and returns the uid of that user.
func (b *Bank) prepare() (uid int, err error) {
	u, err := user.Lookup(owner)
	if err != nil {
		return 0, err
	}
	if uid, err = strconv.Atoi(u.Uid); err != nil {
		return 0, fmt.Errorf("uid of %s: %w", owner, err)
	}
	for _, dir := range []string{b.data(), b.socket()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return 0, err
		}
		if err := os.Chown(dir, uid, uid); err != nil {
			return 0, err
		}
	}
	// The server opens its data directory by the full path, so its user must be able to search dir.
	return uid, os.Chmod(string(b.dir), 0o755)
}

// Connect replaces the connection pool by one with a connection per caller, but at most maxCallers connections.
func (b *Bank) Connect(ctx context.Context, callers int) error {
	config, err := pgxpool.ParseConfig(fmt.Sprintf("host='%s' user=%s database=postgres pool_max_conns=%d", b.socket(), owner, min(callers, maxCallers)))
	if err != nil {
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return err
	}
	b.hangUp()
	b.pool = pool
	return nil
}

func (b *Bank) hangUp() {
	if b.pool != nil {
		b.pool.Close()
	}
	b.pool = nil
}

// Fill creates wallets, each with a first balance of deposit, updates the planner's statistics and makes a checkpoint.
func (b *Bank) Fill(ctx context.Context, wallets []string, deposit int64) error {
	const wallet = `insert into wallet select unnest($1::text[]), 'bench', 1, $2::bigint, 0, $2::bigint, 0, 0, 1, now_ms(), now_ms()`
	const top = `insert into journal select unnest($1::text[]), 1, gen_random_uuid(), 1, $2::bigint, $2::bigint, 'initial balance', '', null, now_ms(), 'bench'`
	for _, statement := range []string{wallet, top} {
		if _, err := b.pool.Exec(ctx, statement, wallets, deposit); err != nil {
			return fmt.Errorf("make wallets: %w", err)
		}
	}
	for _, statement := range []string{"vacuum analyze", "checkpoint"} {
		if _, err := b.pool.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

// Pair reserves an amount and commits the complete reservation, in two transactions. Each is one call of a prepared
// statement, in one round trip.
func (b *Bank) Pair(ctx context.Context, _ int, wallet string, amount int64) error {
	// UUIDs of version 7 increase with time, as in Trivet, so that new ones are inserted into the same index pages.
	var ids [4][16]byte
	for i := range ids {
		id, err := uuid.NewV7()
		if err != nil {
			return fmt.Errorf("draw ids: %w", err)
		}
		ids[i] = id
	}
	if _, err := b.pool.Exec(ctx, "select reserve($1, $2, $3, $4, 300, $5, $6, $7)", wallet, ids[0], ids[1], amount,
		"a machine for an hour", "vm", "bench"); err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	if _, err := b.pool.Exec(ctx, "select commit_reservation($1, $2, $3, $4, 0, $5, $6)", wallet, ids[0], ids[2], ids[3], "vm-1", "bench"); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// Books returns the sums, recomputed from the journal and the reservations. It returns an error if a wallet's row
// differs from its recomputed sums.
func (b *Bank) Books(ctx context.Context) (sum books.Books, err error) {
	var bad int64
	err = b.pool.QueryRow(ctx, sums).Scan(&sum.Wallets, &sum.Transactions, &sum.Reservations, &sum.Deposited, &sum.Consumed, &sum.Reserved, &sum.Balance, &bad)
	if err == nil && bad > 0 {
		err = fmt.Errorf("%d wallets do not add up", bad)
	}
	return sum, err
}

// PIDs returns the pids of the server and of its child processes, which serve the connections.
func (b *Bank) PIDs() ([]int, error) {
	pid := b.dir.Running(name)
	if pid == 0 {
		return nil, errors.New("PostgreSQL has stopped")
	}
	children, err := usage.Children(pid)
	return append(children, pid), err
}

// Usage returns the CPU time and bytes written of the server and of its child processes, including ended ones.
func (b *Bank) Usage() (usage.Sample, error) {
	pid := b.dir.Running(name)
	if pid == 0 {
		return usage.Sample{}, errors.New("PostgreSQL has stopped")
	}
	return usage.Tree(pid)
}

// Close stops the server with PostgreSQL's fast shutdown (SIGINT), which does not wait for clients to disconnect.
func (b *Bank) Close() error {
	b.hangUp()
	if b.dir.Running(name) == 0 {
		return nil
	}
	b.dir.Signal(name, syscall.SIGINT)
	return b.dir.Stop(name, stopWithin)
}
