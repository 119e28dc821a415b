package store

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"strings"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// PageRequest holds the parameters of a call of Page.
type PageRequest struct {
	// Size is the number of records per page, at most cloud.MaxPage; 0 means cloud.DefaultPage.
	Size  int32
	Token string
	// Query encodes all other selection parameters of the list. A page token is valid only with the Query of the page
	// that returned the token.
	Query string
	// If After is not empty, only records with paths after it are listed. If Before is not empty, only records with
	// paths before it are listed.
	After, Before []string
	// If Only is not empty, only the record at this path is listed.
	Only []string
}

// maxScan is the approximate maximum number of records that are read for one page. A page that reaches this limit has
// fewer items than requested, and a token for the next page.
const maxScan = 10_000

// pageToken is the content of a page token. It does not depend on the index that a list was read from, so a token of a
// member is valid on members of other versions, which may read the same list from another index.
type pageToken struct {
	// Query identifies the list: it is a part of a hash of PageRequest.Query and of the path of the listed records.
	Query [8]byte
	// Last is the key of the last record that was read. It is the key of the listed record, also if its entry in an index
	// was read. The record need not exist.
	Last []byte
	// Revision is that of the first page.
	Revision int64
}

func errBadToken() error {
	return fault.Invalid("page_token", "is not one that this list gave")
}

func (s *Store) mac(body []byte) []byte {
	h := hmac.New(sha256.New, s.opts.PageKey)
	h.Write(body)
	return h.Sum(nil)[:16]
}

func (s *Store) sealToken(t pageToken) (string, error) {
	body, err := cbor.Marshal(t)
	if err != nil {
		return "", err
	}
	return base64.RawURLEncoding.EncodeToString(append(s.mac(body), body...)), nil
}

func (s *Store) openToken(text string, query [8]byte) (t pageToken, err error) {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(raw) < 16 || !hmac.Equal(raw[:16], s.mac(raw[16:])) {
		return t, errBadToken()
	}
	if err := cbor.Unmarshal(raw[16:], &t); err != nil || t.Query != query {
		return t, errBadToken()
	}
	return t, nil
}

// Page returns one page of the records below path for which keep returns true, in order of their paths, and the token
// of the next page. The token is empty on the last page. All pages of a list show the records as of the revision of the
// first page.
func Page[T any](
	ctx context.Context, s *Store, t Table[T], req PageRequest, keep func(*T) bool, path ...string,
) (items []*T, next string, err error) {
	return PageOfIndex(ctx, s, t, req, Indexed[T, T]{
		Table: t, Path: path,
		ID: func(r Record[T]) string { return strings.Join(r.Path[len(path):], "/") },
		Find: func(_ *View, r Record[T]) (*T, error) {
			if !keep(r.Value) {
				return nil, nil
			}
			return r.Value, nil
		},
	}, path...)
}

// Indexed describes records whose IDs are in an index.
type Indexed[I, T any] struct {
	// The records are in Table, below Path.
	Table Table[T]
	Path  []string
	// ID returns the ID of the record of an index entry: the rest of the record's path after Path. It must be the rest of
	// the entry's path too, except in a list with PageRequest.Only.
	ID func(Record[I]) string
	// Find returns the record of an index entry as of the View, or nil for an entry that is left out.
	Find func(*View, Record[I]) (*T, error)
}

// PageOfIndex is like Page for the records that the entries of an index below path name. Its tokens are those of Page
// for the same records and the same Query.
func PageOfIndex[I, T any](
	ctx context.Context, s *Store, index Table[I], req PageRequest, of Indexed[I, T], path ...string,
) (items []*T, next string, err error) {
	size := int(req.Size)
	switch {
	case size < 0 || size > cloud.MaxPage:
		return nil, "", fault.Invalid("page_size", "must be 0 to %d, got %d", cloud.MaxPage, size)
	case size == 0:
		size = cloud.DefaultPage
	}
	below, _ := of.Table.below(of.Path)
	sum := sha256.Sum256(append(append([]byte(req.Query), 0), below...))
	token := pageToken{Query: [8]byte(sum[:8])}
	start, end := index.bounds(req, path)
	last := "" // of the page before, in a list with Only
	if req.Token != "" {
		if token, err = s.openToken(req.Token, token.Query); err != nil {
			return nil, "", err
		}
		last = strings.TrimPrefix(string(token.Last), string(below))
		if len(req.Only) == 0 {
			first, _ := index.below(path)
			start, last = append(append(first, last...), 0), ""
		}
	}
	read := func(v *View) error {
		if token.Revision != 0 {
			v = v.at(token.Revision)
		}
		token.Revision = v.Revision()
		items, next, err = page(s, index, v, size, token, start, end, last, below, of)
		return err
	}
	if err := s.View(ctx, read); err != nil {
		if f, ok := fault.From(err); ok && f.Reason == "HISTORY_EXPIRED" {
			err = fault.Invalid("page_token", "is too old: list again from the start").WithReason("PAGE_TOKEN_EXPIRED").Because(err)
		}
		return nil, "", err
	}
	return items, next, nil
}

// bounds returns the range of keys that the first page of a list reads. start is inclusive, end is exclusive.
func (t Table[T]) bounds(req PageRequest, path []string) (start, end []byte) {
	start, end = t.below(path)
	if len(req.After) > 0 {
		start = append(t.key(req.After), 0)
	}
	if len(req.Before) > 0 {
		end = t.key(req.Before)
	}
	if len(req.Only) > 0 {
		start = t.key(req.Only)
		end = append(bytes.Clone(start), 0)
	}
	return start, end
}

// page reads one page from the range of an index. It leaves out the records up to the ID last, unless that is empty.
func page[I, T any](
	s *Store, index Table[I], v *View, size int, token pageToken, start, end []byte, last string, below []byte,
	of Indexed[I, T],
) (items []*T, next string, err error) {
	var read Record[I] // the last one that this page has, or has left out
	seal := func() ([]*T, string, error) {
		token.Last = append(bytes.Clone(below), of.ID(read)...)
		next, err := s.sealToken(token)
		return items, next, err
	}
	for scanned := 0; ; {
		records, more, err := index.list(v, start, end, size+1)
		if err != nil {
			return nil, "", err
		}
		for _, r := range records {
			if last != "" && of.ID(r) <= last {
				continue
			}
			item, err := of.Find(v, r)
			if err != nil {
				return nil, "", err
			}
			if item != nil {
				if len(items) == size { // the page is full: it ends at the last record that was added
					return seal()
				}
				items = append(items, item)
			}
			read = r
			scanned++
		}
		if !more {
			return items, "", nil
		}
		if scanned >= maxScan {
			return seal()
		}
		start = append(index.key(records[len(records)-1].Path), 0)
	}
}
