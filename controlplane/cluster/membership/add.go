package membership

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of a member's record, and default ports. maxName and maxURL are maximum lengths in bytes. maxClientURLs is a
// maximum number.
const (
	maxName       = 128
	maxURL        = 512
	maxClientURLs = 16
	// peersPort and clientsPort are the ports of addresses in which no port is given.
	peersPort   = "2380"
	clientsPort = "50051"
)

// AddRequest describes a member to add.
type AddRequest struct {
	// ID is the ID of the new member; 0 means that a random ID is generated.
	ID uint64
	// Name is the name of the new member. If it is empty and ID is given, the name is node-<ID>.
	Name string
	// RaftAddr is the host:port or the URL at which the member receives raft messages. If it has no scheme, http:// is
	// added.
	RaftAddr string
	// ClientURLs are the URLs at which the member serves clients. The default is http://<host of RaftAddr>:50051.
	ClientURLs []string
	// Learner, if true, means that the member stays a learner until Promote is called. Otherwise it becomes a voter
	// when it has caught up.
	Learner bool
	// Open is true if the caller has sent no credential.
	Open bool `cbor:",omitempty"`
}

// Add creates the record of a new member, so that a process may join as that member. If a member with the same ID and
// address exists, Add returns that member. It returns InvalidArgument, or FailedPrecondition with ReasonExists,
// ReasonAddressTaken, ReasonRemoved, ReasonTooMany or ReasonBusy.
func (s *Service) Add(ctx context.Context, q AddRequest) (added Member, all []Member, err error) {
	if err := q.complete(); err != nil {
		return Member{}, nil, err
	}
	if added, err = addCommand.Call(ctx, s.opts.Commands, q); err != nil {
		return Member{}, nil, s.inTime(ctx, err)
	}
	all, err = s.List(ctx, false)
	return added, all, s.inTime(ctx, err)
}

// complete checks a request and sets its defaults, including a random ID. It runs before the request is sent to the
// leader. So a request that is sent again has the same ID, and no second member is added.
func (q *AddRequest) complete() (err error) {
	chosen := q.ID == 0
	if chosen {
		q.ID = newID()
	}
	if q.ID >= 1<<63 {
		return fault.Invalid("node_id", "must be 1 to 2^63-1")
	}
	if q.RaftAddr, err = checkURL("raft_addr", q.RaftAddr); err != nil {
		return err
	}
	q.Name = strings.TrimSpace(q.Name)
	if q.Name == "" && !chosen {
		q.Name = "node-" + path(q.ID)
	}
	if len(q.Name) > maxName || strings.ContainsFunc(q.Name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return fault.Invalid("name", "must be at most %d bytes without control characters", maxName)
	}
	if len(q.ClientURLs) == 0 {
		host, _, err := net.SplitHostPort(HostPort(q.RaftAddr))
		if err != nil {
			return fault.Invalid("raft_addr", "is not an address")
		}
		q.ClientURLs = []string{"http://" + net.JoinHostPort(host, clientsPort)}
	}
	return checkClientURLs(&q.ClientURLs)
}

func checkClientURLs(urls *[]string) error {
	if len(*urls) > maxClientURLs {
		return fault.Invalid("client_url", "at most %d of them", maxClientURLs)
	}
	*urls = slices.Clone(*urls)
	for i, u := range *urls {
		checked, err := checkURL("client_url", u)
		if err != nil {
			return err
		}
		(*urls)[i] = checked
	}
	return nil
}

// checkURL returns the URL in text. It adds http:// if text has no scheme. It returns InvalidArgument if the result is
// not a URL with a host, or is too long.
func checkURL(field, text string) (string, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return "", fault.Invalid(field, "is required")
	}
	if !strings.Contains(text, "://") {
		text = "http://" + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || len(text) > maxURL || strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return "", fault.Invalid(field, "must be host:port or a URL of at most %d bytes", maxURL)
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", fault.Invalid(field, "names port %s", port)
		}
	}
	return text, nil
}

// HostPort returns the host:port of a Member.RaftAddr. If the address has no port, the port is 2380.
func HostPort(raftAddr string) string {
	u, err := url.Parse(raftAddr)
	if err != nil || u.Hostname() == "" {
		return raftAddr
	}
	port := u.Port()
	if port == "" {
		port = peersPort
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// newID returns a random ID between 1 and 2^53-1.
func newID() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return max(binary.BigEndian.Uint64(b[:])&MaxID, 1)
}

var addCommand = leader.NewCommand("member.add", leader.Repeatable, (*Service).addOnLeader)

// addOnLeader implements Add on the leader: it stores the record of the new member, or returns the existing one.
func (s *Service) addOnLeader(ctx context.Context, q AddRequest) (made Member, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, err := list(tx)
		if err != nil {
			return err
		}
		if m := find(all, q.ID); m != nil {
			made = *m
			switch {
			case m.State == Leaving:
				return fault.New(fault.FailedPrecondition, "member %d is being removed", q.ID).WithReason(ReasonBusy)
			case HostPort(m.RaftAddr) != HostPort(q.RaftAddr):
				return fault.New(fault.FailedPrecondition, "member %d exists already, with the address %s", q.ID, m.RaftAddr).WithReason(ReasonExists)
			}
			return nil
		}
		if err := admit(tx, all, q); err != nil {
			return err
		}
		made = Member{
			ID: q.ID, Name: q.Name, RaftAddr: q.RaftAddr, ClientURLs: q.ClientURLs, Wanted: Voter, State: Waiting, Since: tx.Now(), Open: q.Open,
		}
		if q.Learner {
			made.Wanted = Learner
		}
		Members.Put(tx, &made, path(q.ID))
		return nil
	})
	return made, err
}

// admit returns FailedPrecondition in three cases: the ID belonged to a removed member, another member has the address,
// or there are MaxWaiting entries whose process has not joined. Entries added with and without a credential are counted
// separately.
func admit(tx *store.Tx, all []Member, q AddRequest) error {
	gone, err := removed.Has(tx, path(q.ID))
	if err != nil {
		return err
	}
	if gone {
		return fault.New(fault.FailedPrecondition, "member %d was removed: the ID cannot be used again, choose another", q.ID).WithReason(ReasonRemoved)
	}
	waiting := 0
	for _, m := range all {
		if HostPort(m.RaftAddr) == HostPort(q.RaftAddr) {
			return fault.New(fault.FailedPrecondition, "the address %s belongs to member %d", m.RaftAddr, m.ID).WithReason(ReasonAddressTaken)
		}
		if !m.Proven() && !m.NoExpiry && m.Open == q.Open { // members added with and without a credential have separate limits
			waiting++
		}
	}
	if waiting >= MaxWaiting {
		return fault.New(fault.FailedPrecondition, "%d members that were added have not been started yet: start or remove one", waiting).WithReason(ReasonTooMany)
	}
	return nil
}
