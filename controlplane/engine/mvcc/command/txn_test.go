package command

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTxnLimits(t *testing.T) {
	long, big := bytes.Repeat([]byte("k"), MaxKeyBytes), make([]byte, MaxValueBytes)
	many := make([]Op, MaxTxnOps)
	for i := range many {
		many[i] = Delete([]byte("a"))
	}
	guards := make([]Guard, MaxTxnGuards)
	for i := range guards {
		guards[i] = Guard{Key: []byte("a")}
	}
	full := make([]Op, 0, 6)
	for i := range 6 {
		full = append(full, Put([]byte{byte('a' + i)}, big))
	}
	for name, c := range map[string]struct {
		txn  Txn
		want error
	}{
		"empty":                 {Txn{}, nil},
		"longest key":           {Txn{Ops: []Op{Put(long, nil), DeleteRange(append(long, 0), append(long, 0))}[:1]}, nil},
		"longest end":           {Txn{Ops: []Op{DeleteRange(long, append(long, 0))}}, nil},
		"largest value":         {Txn{Ops: []Op{Put(long, big)}}, nil},
		"most ops":              {Txn{Ops: many}, nil},
		"most guards":           {Txn{Guards: guards}, nil},
		"all keys":              {Txn{Ops: []Op{DeleteRange(nil, []byte{0})}}, nil},
		"put beside a range":    {Txn{Ops: []Op{DeleteRange([]byte("a"), []byte("b")), Put([]byte("b"), nil)}}, nil},
		"key too long":          {Txn{Ops: []Op{Put(append(long, 'k'), nil)}}, ErrTooLarge},
		"end too long":          {Txn{Ops: []Op{DeleteRange(long, append(long, 0, 0))}}, ErrTooLarge},
		"value too large":       {Txn{Ops: []Op{Put(long, append(big, 0))}}, ErrTooLarge},
		"transaction too large": {Txn{Ops: full}, ErrTooLarge},
		"too many ops":          {Txn{Ops: append(many, Delete([]byte("a")))}, ErrTooMany},
		"too many guards":       {Txn{Guards: append(guards, guards[0])}, ErrTooMany},
		"empty key":             {Txn{Ops: []Op{Put(nil, nil)}}, ErrEmptyKey},
		"empty guard key":       {Txn{Guards: []Guard{{}}}, ErrEmptyKey},
		"empty end":             {Txn{Ops: []Op{DeleteRange([]byte("a"), []byte{})}}, ErrInvalid},
		"empty end of a guard":  {Txn{Guards: []Guard{{Key: []byte("a"), End: []byte{}}}}, nil},
		"range without end":     {Txn{Ops: []Op{DeleteRange([]byte("a"), nil)}}, ErrInvalid},
		"end without range":     {Txn{Ops: []Op{{Kind: OpPut, Key: []byte("a"), End: []byte("b")}}}, ErrInvalid},
		"delete with value":     {Txn{Ops: []Op{{Kind: OpDelete, Key: []byte("a"), Value: []byte("b")}}}, ErrInvalid},
		"no kind":               {Txn{Ops: []Op{{Key: []byte("a")}}}, ErrInvalid},
		"negative time":         {Txn{Time: -1}, ErrInvalid},
		"negative revision":     {Txn{Guards: []Guard{{Key: []byte("a"), ModRevision: -1}}}, ErrInvalid},
		"count of one key":      {Txn{Guards: []Guard{{Key: []byte("a"), Count: 1}}}, ErrInvalid},
		"put twice":             {Txn{Ops: []Op{Put([]byte("a"), nil), Put([]byte("a"), nil)}}, ErrDuplicateKey},
		"put and delete":        {Txn{Ops: []Op{Delete([]byte("a")), Put([]byte("a"), nil)}}, ErrDuplicateKey},
		"put in deleted range":  {Txn{Ops: []Op{Put([]byte("b"), nil), DeleteRange([]byte("a"), []byte{0})}}, ErrDuplicateKey},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := EncodeTxn(c.txn)
			if c.want != nil {
				require.ErrorIs(t, err, c.want)
				return
			}
			require.NoError(t, err)
			var back Txn
			require.NoError(t, back.decode(data[2:]))
			require.Equal(t, len(c.txn.Ops), len(back.Ops))
		})
	}
}

// FuzzTxn decodes arbitrary bytes. A transaction that the decoder accepts must be valid, pass EncodeTxn, and decode to
// the same transaction again.
func FuzzTxn(f *testing.F) {
	for _, t := range []Txn{
		{},
		{Time: 1, Guards: []Guard{{Key: []byte("a"), ModRevision: 7}, {Key: []byte("a"), End: []byte("b"), ModRevision: 7, Count: 2}}},
		{Ops: []Op{Put([]byte("a"), []byte("1")), Delete([]byte("b")), DeleteRange([]byte("c"), []byte{0})}},
	} {
		data, err := EncodeTxn(t)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data[2:])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var txn, back Txn
		if txn.decode(data) != nil || len(data) > MaxTxnBytes/2 {
			return
		}
		require.NoError(t, txn.Validate())
		again, err := EncodeTxn(txn)
		require.NoError(t, err)
		require.NoError(t, back.decode(again[2:]))
		require.Equal(t, txn, back)
	})
}

// FuzzResult decodes arbitrary bytes with DecodeResult. A result that it accepts must encode, and decode to the same
// result again.
func FuzzResult(f *testing.F) {
	f.Add(EncodeResult(nil, Result{Revision: 3, Time: 1 << 40}))
	f.Add(EncodeResult(nil, Result{Revision: 3, Conflict: true, FailedGuard: 300}))
	f.Add(EncodeResult(nil, Result{Revision: 3, Refused: RefusedTooMany}))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := DecodeResult(data)
		if err != nil {
			require.True(t, strings.Contains(err.Error(), "result"))
			return
		}
		back, err := DecodeResult(EncodeResult(nil, r))
		require.NoError(t, err)
		require.Equal(t, r, back)
	})
}
