package store

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"

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

type pageToken struct {
	Query    [8]byte
	Last     []byte
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
func Page[T any](ctx context.Context, s *Store, t Table[T], req PageRequest, keep func(*T) bool, path ...string) (items []*T, next string, err error) {
	find := func(_ *View, r Record[T]) (*T, error) {
		if !keep(r.Value) {
			return nil, nil
		}
		return r.Value, nil
	}
	return PageOfIndex(ctx, s, t, req, find, path...)
}

// PageOfIndex is like Page for the records that an index names. For each entry of the index below path it calls find,
// which returns the record as of the View, or nil for an entry that is left out. The order is that of the index.
func PageOfIndex[I, T any](
	ctx context.Context, s *Store, t Table[I], req PageRequest, find func(*View, Record[I]) (*T, error), path ...string,
) (items []*T, next string, err error) {
	size := int(req.Size)
	switch {
	case size < 0 || size > cloud.MaxPage:
		return nil, "", fault.Invalid("page_size", "must be 0 to %d, got %d", cloud.MaxPage, size)
	case size == 0:
		size = cloud.DefaultPage
	}
	start, end := t.below(path)
	sum := sha256.Sum256(append(append([]byte(req.Query), 0), start...))
	query := [8]byte(sum[:8])
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
	var token pageToken
	if req.Token != "" {
		if token, err = s.openToken(req.Token, query); err != nil {
			return nil, "", err
		}
		start = append(bytes.Clone(token.Last), 0)
	}
	read := func(v *View) error {
		if token.Revision != 0 {
			v = v.at(token.Revision)
		}
		items, next, err = page(s, t, v, size, pageToken{Query: query, Revision: v.Revision()}, start, end, find)
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

func page[I, T any](
	s *Store, t Table[I], v *View, size int, token pageToken, start, end []byte, find func(*View, Record[I]) (*T, error),
) (items []*T, next string, err error) {
	for scanned := 0; ; {
		records, more, err := t.list(v, start, end, size+1)
		if err != nil {
			return nil, "", err
		}
		for i, r := range records {
			item, err := find(v, r)
			if err != nil {
				return nil, "", err
			}
			if item != nil {
				if len(items) == size { // the page is full: it ends at the last record that was added
					next, err = s.sealToken(token)
					return items, next, err
				}
				items = append(items, item)
			}
			token.Last = t.key(records[i].Path)
			scanned++
		}
		if !more {
			return items, "", nil
		}
		if scanned >= maxScan {
			next, err = s.sealToken(token)
			return items, next, err
		}
		start = append(bytes.Clone(token.Last), 0)
	}
}
