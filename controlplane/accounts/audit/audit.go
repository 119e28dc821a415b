// Package audit keeps who did what, and who was refused, as records that are only ever added.
//
// What a call changes and the record of it are one entry of the log: Stamp adds the record to every update that a call
// makes, wherever the leader is, so an effect without its record cannot be. What leaves no trace in the records (a
// refusal, a call that failed, a token that was issued) is noted by the edge that answered and written a moment later:
// those of the last second before a member dies may be missing. It knows no service; package auth says what a call is.
//
// Decisions:
//   - Refusals cannot fill the store: a member writes at most maxNotes a second, and like ones are one record that says
//     how many it stands for. Those of callers who proved nothing are alike when their outcome and network are, and have
//     places of their own, so that nobody crowds out what is known of others.
//   - The principal is who proved to be one; a name that was only claimed is part of the target.
//   - Reading is not recorded, its refusal is. A call that commits in several steps has a record a step, under one request
//     id.
//   - No record holds a password, a secret, a token or a body: only the call's ids and names.
//   - Records are kept for Keep. In each class of records, each org or principal has a limited number (see limits) and
//     only replaces its own oldest records: nobody can evict the records of others, and ordinary traffic does not evict
//     records of changes to roles or to the cluster. The leader counts and removes records (Prune); between two runs
//     the write budget (package budget) bounds the number of new records.
//
// Keys: audit/<time, newest first>/<request id>; the time is 16 hexadecimal digits of what is left until the end of time.
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
)

// OK is the outcome of a call that was carried out; of others it is the gRPC code, in capitals.
const OK = "OK"

// Record is one thing that was done or refused.
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
	// Suppressed is how many others like it the record stands for.
	Suppressed uint64 `cbor:",omitempty"`
}

var records = store.NewTable[Record]("audit")

// Of is a record of what a caller was let in for.
func Of(c *cloud.Caller) Record {
	r := Record{
		Principal: c.Name(), Proof: c.Proof, Tenant: c.Payer(), Method: c.Method, Target: c.Target, Outcome: OK,
		RequestID: c.RequestID, Address: c.Address,
	}
	if !c.Proven() && c.Node == "" {
		r.Principal, r.Tenant = "", cloud.Tenant{}
		if c.User != "" {
			r.Target = strings.TrimSpace("claims=" + string(c.User) + " " + r.Target)
		}
	}
	r.clean()
	return r
}

// clean bounds the texts that a caller chose, and makes them texts.
func (r *Record) clean() {
	for _, text := range []*string{&r.Principal, &r.Method, &r.Target, &r.Message, &r.Address, &r.RequestID} {
		*text = cut(strings.ToValidUTF8(*text, "�"))
	}
}

// maxText bounds a text of a record, in bytes.
const maxText = 512

func cut(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText], "") + "…"
}

// Stamp adds to an update the record of the call that it is made for. An update of no call has none.
func Stamp(ctx context.Context, tx *store.Tx) {
	if c := auth.CallerOf(ctx); c != nil {
		Add(tx, c)
	}
}

// Add records in an update what a caller was let in for, for whoever carries out several calls in one.
func Add(tx *store.Tx, c *cloud.Caller) {
	if c.Method == "" {
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

// newestFirst orders times backwards.
func newestFirst(at cloud.Time) string { return fmt.Sprintf("%016x", uint64(math.MaxInt64-max(at, 0))) }

// Query selects records. Empty fields select all.
type Query struct {
	// Within selects a tenant's: an org's with all its projects, or one project's.
	Within    cloud.Tenant
	Principal string
	// Method is a full name, or its last part.
	Method string
	// Outcome is one, or REFUSED for all but OK.
	Outcome string
	// Since is the first moment, Until the first that is too late; 0 is no bound.
	Since, Until cloud.Time
	Size         int32
	Token        string
}

// Refused selects whatever is not OK.
const Refused = "REFUSED"

func (q *Query) keeps(r *Record) bool {
	return (q.Within.Org == "" || r.Tenant.Org == q.Within.Org) && (q.Within.Project == "" || r.Tenant.Project == q.Within.Project) &&
		(q.Principal == "" || r.Principal == q.Principal) &&
		(q.Method == "" || r.Method == q.Method || strings.HasSuffix(r.Method, "/"+q.Method)) &&
		(q.Outcome == "" || r.Outcome == q.Outcome || q.Outcome == Refused && r.Outcome != OK) &&
		r.At >= q.Since && (q.Until == 0 || r.At < q.Until)
}

// List is a page of records, newest first.
func (s *Service) List(ctx context.Context, q Query) ([]*Record, string, error) {
	if q.Since < 0 || q.Until < 0 {
		return nil, "", fault.Invalid("since", "since and until are Unix milliseconds, 0 for no bound")
	}
	req := store.PageRequest{Size: q.Size, Token: q.Token, Query: fmt.Sprintf("audit\x00%q", []any{q.Within, q.Principal, q.Method, q.Outcome, q.Since, q.Until})}
	if q.Until > 0 {
		// Of that moment itself nothing is wanted: what is sorted before its ids is skipped, the rest by keeps.
		req.After = []string{newestFirst(q.Until)}
	}
	if q.Since > 0 {
		req.Before = []string{newestFirst(q.Since - 1)}
	}
	return store.Page(ctx, s.opts.Store, records, req, q.keeps)
}
