// Package audit stores append-only records of executed and refused calls, with their principals.
//
// The changes of a call and its audit record are in one log entry: Stamp adds the record to every update that a call
// makes, on whichever member the leader runs, so there is no change without a record. A call that changes no records (a
// refusal, a failed call, an issued token) is queued as a note by the member that received it, and written at most
// noteEvery later: the notes of the last second before a member crashes may be missing. Package audit does not depend
// on the services; package auth describes the call.
//
// Decisions:
//   - Refusals cannot fill the store: a member writes a limited number per second (see noteEvery), and similar ones are
//     merged into one record with a count. Those of unauthenticated callers are merged by outcome and network, and have
//     a limit of their own, so that they cannot displace records of others.
//   - The principal is set only if it was authenticated; a name that was only claimed is part of the target.
//   - A read has no record, unless it was refused. A call that commits in several steps has one record per step, all
//     with the same request ID.
//   - No record contains a password, a secret, a token or a body: only the call's IDs and names.
//   - Records are stored for Keep. In each class of records, each org or principal has a limited number (see limits)
//     and only replaces its own oldest records: no tenant can evict the records of others, and ordinary traffic does
//     not evict records of changes to roles or to the cluster. The leader counts and removes records (Prune); between
//     two runs the write budget (package budget) bounds the number of new records.
//
// Keys: audit/<time, newest first>/<request id>; the time is MaxInt64 minus the time, as 16 hexadecimal digits.
package audit

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// OK is the outcome of a successful call; other outcomes are names of gRPC codes in capitals, such as
// PERMISSION_DENIED.
const OK = "OK"

// Record describes one call that was executed or refused.
type Record struct {
	ID        string
	At        cloud.Time
	Principal string       `cbor:",omitempty"`
	Proof     cloud.Proof  `cbor:",omitempty"`
	Tenant    cloud.Tenant `cbor:",omitempty"`
	Method    string       `cbor:",omitempty"`
	Target    string       `cbor:",omitempty"`
	Outcome   string
	Message   string `cbor:",omitempty"`
	RequestID string `cbor:",omitempty"`
	Address   string `cbor:",omitempty"`
	// Suppressed is the number of similar calls that were merged into this record.
	Suppressed uint64 `cbor:",omitempty"`
}

var records = store.NewTable[Record]("audit")

// Of returns the record of a call that succeeded. A user name that the caller did not prove becomes part of the target.
func Of(c *cloud.Caller) Record {
	r := Record{
		Principal: c.Name(), Proof: c.Proof, Tenant: c.Payer(), Method: c.Method, Target: c.Target, Outcome: OK,
		RequestID: c.RequestID, Address: c.Address,
	}
	if !c.Authenticated() && c.Node == "" {
		r.Principal, r.Tenant = "", cloud.Tenant{}
		if c.User != "" {
			r.Target = strings.TrimSpace("claims=" + string(c.User) + " " + r.Target)
		}
	}
	r.clean()
	return r
}

// clean truncates the texts that a caller chose to maxText bytes, and replaces invalid UTF-8 in them.
func (r *Record) clean() {
	for _, text := range []*string{&r.Principal, &r.Method, &r.Target, &r.Message, &r.Address, &r.RequestID} {
		*text = truncate(strings.ToValidUTF8(*text, "�"))
	}
}

// maxText is the maximum length of a text in a record, in bytes.
const maxText = 512

func truncate(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText], "") + "…"
}

// Stamp adds the audit record of the call in ctx to the transaction. It adds none if ctx contains no caller.
func Stamp(ctx context.Context, tx *store.Tx) {
	if c := auth.CallerOf(ctx); c != nil {
		Add(tx, c)
	}
}

// Add adds the audit record of the caller's call to the transaction. It is for transactions that execute several calls
// at once; the others use Stamp.
func Add(tx *store.Tx, c *cloud.Caller) {
	if c.Method == "" || mutant.On(mutant.UnauditedChange) {
		return
	}
	r := Of(c)
	put(tx, &r)
}

func put(tx *store.Tx, r *Record) {
	r.At = tx.Now()
	if r.RequestID != "" {
		r.ID = r.RequestID
	} else {
		r.ID = uuid.NewString()
	}
	records.Put(tx, r, newestFirst(r.At), r.ID)
}

// newestFirst encodes a time as a part of a key, so that later times sort first.
func newestFirst(at cloud.Time) string { return fmt.Sprintf("%016x", uint64(math.MaxInt64-max(at, 0))) }

// Query selects the records that match all of its fields. An empty field matches every record.
type Query struct {
	// Within selects the records of an org with all its projects, or of one project.
	Within    cloud.Tenant
	Principal string
	// Method is the full name of a method, or its last part.
	Method string
	// Outcome is an outcome, or Refused for all but OK.
	Outcome string
	// Since and Until limit the time of the records, Since inclusive and Until exclusive; 0 means no limit.
	Since, Until cloud.Time
	Size         int32
	Token        string
}

// Refused, as Query.Outcome, selects every outcome but OK.
const Refused = "REFUSED"

func (q *Query) matches(r *Record) bool {
	return (q.Within.Org == "" || r.Tenant.Org == q.Within.Org) && (q.Within.Project == "" || r.Tenant.Project == q.Within.Project) &&
		(q.Principal == "" || r.Principal == q.Principal) &&
		(q.Method == "" || r.Method == q.Method || strings.HasSuffix(r.Method, "/"+q.Method)) &&
		(q.Outcome == "" || r.Outcome == q.Outcome || q.Outcome == Refused && r.Outcome != OK) &&
		r.At >= q.Since && (q.Until == 0 || r.At < q.Until)
}

// List returns a page of records, newest first.
func (s *Service) List(ctx context.Context, q Query) ([]*Record, string, error) {
	if q.Since < 0 || q.Until < 0 {
		return nil, "", fault.Invalid("since", "since and until are Unix milliseconds, 0 for no bound")
	}
	req := store.PageRequest{Size: q.Size, Token: q.Token, Query: fmt.Sprintf("audit\x00%q", []any{q.Within, q.Principal, q.Method, q.Outcome, q.Since, q.Until})}
	if q.Until > 0 {
		// This skips the records after Until. Those at Until itself are skipped by Query.matches.
		req.After = []string{newestFirst(q.Until)}
	}
	if q.Since > 0 {
		req.Before = []string{newestFirst(q.Since - 1)}
	}
	return store.Page(ctx, s.opts.Store, records, req, q.matches)
}
