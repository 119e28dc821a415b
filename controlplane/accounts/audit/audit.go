// Package audit stores append-only records of executed and refused calls, with their principals.
//
// The changes of a call and its audit record are in one log entry: Stamp adds the record to every update that a call
// makes, on whichever member the leader runs, so there is no change without a record. If a call changes no records (a
// refusal, a failed call, an issued token), the member that received the call queues its audit record as a note, and
// writes the note at most noteEvery later. If a member crashes, its notes of the last second may be lost. Package audit
// does not depend on the services: it gets the description of the call (cloud.Caller) from package auth.
//
// Decisions:
//   - Refusals cannot fill the store: a member writes a limited number of them per second (see noteEvery), and merges
//     similar refusals into one record with a count. Refusals of unauthenticated callers are merged by outcome and
//     network. They have a separate limit, so that they cannot displace the records of authenticated callers.
//   - The field Principal is set only if the caller was authenticated. A user name that an unauthenticated caller gave
//     is part of the field Target.
//   - A read has no record, unless it was refused. A call that commits in several steps has one record per step, all
//     with the same request ID.
//   - The records of changes contain the name that the object had before the change, as "object=" at the beginning of
//     Target: the object may be renamed or deleted later. It comes from the transaction, which has read the object's
//     record. Records of refused and failed calls have only the ID, because the member that writes them has not
//     necessarily read the object.
//   - No record contains a password, a secret, a token or a body: only the call's IDs and names.
//   - Records are stored for the duration Keep. Each record has a class, such as changes of VMs or refused calls. In
//     each class the number of records of each org or principal is limited (see limits). At the limit, a new record
//     replaces the oldest record of the same org or principal. So no tenant can evict the records of others, and
//     ordinary calls do not evict the records of changes to roles or to the cluster. The leader counts and removes
//     records (Prune); between two runs, package budget bounds the number of new records, because it limits the rate of
//     changes of each tenant.
//
// Keys: audit/<time>/<request id>. To sort the newest records first, <time> is MaxInt64 minus the Unix milliseconds, as
// 16 hexadecimal digits.
package audit

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// OK is the outcome of a successful call. Every other outcome is the name of a gRPC code in capitals, such as
// PERMISSION_DENIED.
const OK = "OK"

// suppressed is the outcome of a record that counts the refusals of which a member wrote no records.
const suppressed = "SUPPRESSED"

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

// Of returns the record of a call that succeeded. For an unauthenticated user, Principal is empty, and the user name
// that the caller gave is a part of Target.
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

// clean replaces invalid UTF-8 in the text fields of the record, and truncates each field to maxText bytes, because
// callers choose these texts.
func (r *Record) clean() {
	for _, text := range []*string{&r.Principal, &r.Method, &r.Target, &r.Message, &r.Address, &r.RequestID} {
		*text = truncate(strings.ToValidUTF8(*text, "�"))
	}
}

// maxText is the maximum length of each text field of a record, in bytes.
const maxText = 512

func truncate(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText], "") + "…"
}

// Stamp adds the audit record of the call in ctx to the transaction tx. If ctx contains no call, Stamp adds nothing.
func Stamp(ctx context.Context, tx *store.Tx) {
	if c := auth.CallerOf(ctx); c != nil {
		Add(tx, c)
	}
}

// Add adds the audit record of the call that c describes to the transaction tx. A transaction that executes several
// calls uses Add once for each call; a transaction of one call uses Stamp.
func Add(tx *store.Tx, c *cloud.Caller) {
	if c.Method == "" || mutant.On(mutant.UnauditedChange) {
		return
	}
	r := Of(c)
	if name := objectName(c.Method, r.Target, tx.NameOf); name != "" {
		r.Target = "object=" + quoted(name) + " " + r.Target
		r.clean()
	}
	put(tx, &r)
	tx.CountAudited()
}

// quoted returns a name in quotes if it has characters that could be mistaken for other parts of a target.
func quoted(name string) string {
	if strings.ContainsFunc(name, func(r rune) bool { return r == '=' || r == '"' || unicode.IsSpace(r) }) {
		return strconv.Quote(name)
	}
	return name
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

// newestFirst returns MaxInt64 minus the time at, as 16 hexadecimal digits. As a part of a key, they make later times
// sort first.
func newestFirst(at cloud.Time) string { return fmt.Sprintf("%016x", uint64(math.MaxInt64-max(at, 0))) }

// List returns a page of records, newest first.
func (s *Service) List(ctx context.Context, q Query) ([]*Record, string, error) {
	if err := q.check(); err != nil {
		return nil, "", err
	}
	req := store.PageRequest{Size: q.Size, Token: q.Token, Query: fmt.Sprintf("audit\x00%q", []any{q.Within, q.Principal, q.Method, q.Outcome, q.Since, q.Until})}
	if q.Until > 0 {
		// This skips the records later than Until. Query.matches skips the records whose time is exactly Until.
		req.After = []string{newestFirst(q.Until)}
	}
	if q.Since > 0 {
		req.Before = []string{newestFirst(q.Since - 1)}
	}
	return store.Page(ctx, s.opts.Store, records, req, q.matches)
}
