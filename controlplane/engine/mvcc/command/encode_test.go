package command

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProgramLimits(t *testing.T) {
	long, big := bytes.Repeat([]byte("k"), MaxKeyBytes), make([]byte, MaxValueBytes)
	a := []byte("a")
	one := Step{Kind: StepPut, Key: a}
	nested := func(depth int) []Step {
		steps := []Step{one}
		for range depth {
			steps = []Step{{Kind: StepBranch, Then: steps}}
		}
		return steps
	}
	for name, c := range map[string]struct {
		steps []Step
		want  error
	}{
		"empty":                                {nil, nil},
		"longest key":                          {[]Step{{Kind: StepPut, Key: long, Value: big}}, nil},
		"longest end":                          {[]Step{{Kind: StepDelete, Key: long, End: append(long, 0)}}, nil},
		"deepest":                              {nested(MaxProgramDepth), nil},
		"most steps":                           {repeat(MaxProgramSteps, one), nil},
		"put twice":                            {[]Step{one, one}, nil},
		"all keys":                             {[]Step{{Kind: StepRange, End: []byte{0}}}, nil},
		"negative lease":                       {[]Step{{Kind: StepGrant, Lease: -1}, {Kind: StepPut, Key: a, Lease: -1}}, nil},
		"key too long":                         {[]Step{{Kind: StepPut, Key: append(long, 'k')}}, ErrTooLarge},
		"end too long":                         {[]Step{{Kind: StepRange, Key: a, End: append(long, 0, 0)}}, ErrTooLarge},
		"value too large":                      {[]Step{{Kind: StepPut, Key: a, Value: append(big, 0)}}, ErrTooLarge},
		"program too large":                    {repeat(6, Step{Kind: StepPut, Key: a, Value: big}), ErrTooLarge},
		"compare too large":                    {[]Step{{Kind: StepBranch, If: []Compare{{Key: a, Target: CompareValue, Value: append(big, 0)}}}}, ErrTooLarge},
		"branches too deeply nested":           {nested(MaxProgramDepth + 1), ErrTooMany},
		"too many steps":                       {repeat(MaxProgramSteps+1, one), ErrTooMany},
		"too many steps in a branch":           {[]Step{{Kind: StepBranch, Else: repeat(MaxProgramSteps, one)}}, ErrTooMany},
		"too many compares":                    {[]Step{{Kind: StepBranch, If: make([]Compare, MaxProgramSteps)}}, ErrTooMany},
		"empty key":                            {[]Step{{Kind: StepPut}}, ErrEmptyKey},
		"empty compare key":                    {[]Step{{Kind: StepBranch, If: []Compare{{}}}}, ErrEmptyKey},
		"empty name":                           {[]Step{{Kind: StepSetRecord}}, ErrEmptyKey},
		"no kind":                              {[]Step{{Key: a}}, ErrInvalid},
		"lease 0":                              {[]Step{{Kind: StepGrant, TTL: 1}}, ErrInvalid},
		"revoke with keys instead of a digest": {[]Step{{Kind: StepRevoke, Lease: 1, Value: a}}, ErrInvalid},
		"negative TTL":                         {[]Step{{Kind: StepGrant, Lease: 1, TTL: -1}}, ErrInvalid},
		"negative revision":                    {[]Step{{Kind: StepRange, Key: a, Range: RangeOptions{Revision: -1}}}, ErrInvalid},
		"unknown target":                       {[]Step{{Kind: StepBranch, If: []Compare{{Key: a, Target: 5}}}}, ErrInvalid},
		"unknown relation":                     {[]Step{{Kind: StepBranch, If: []Compare{{Key: a, Relation: 4}}}}, ErrInvalid},
		"branches of a put":                    {[]Step{{Kind: StepPut, Key: a, Then: []Step{one}}}, ErrInvalid},
		"value with IgnoreValue":               {[]Step{{Kind: StepPut, Key: a, Value: a, IgnoreValue: true}}, ErrInvalid},
		"end of a put":                         {[]Step{{Kind: StepPut, Key: a, End: a}}, ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := EncodeProgram(Program{Epoch: 7, Steps: c.steps})
			if c.want != nil {
				require.ErrorIs(t, err, c.want)
				return
			}
			require.NoError(t, err)
			back, err := new(programDecoder).decode(data[2:])
			require.NoError(t, err)
			require.Equal(t, int64(7), back.Epoch)
			require.Len(t, back.Steps, len(c.steps))
		})
	}
	_, err := EncodeProgram(Program{Epoch: -1})
	require.ErrorIs(t, err, ErrInvalid)
	data, err := EncodeProgram(Program{Steps: []Step{{Kind: StepPut, Key: a, Value: make([]byte, 256)}}})
	require.NoError(t, err)
	require.LessOrEqual(t, len(data), 1+256+8)
}

func repeat(n int, st Step) []Step {
	steps := make([]Step, n)
	for i := range steps {
		steps[i] = st
	}
	return steps
}

// FuzzProgram decodes arbitrary bytes. A program that the decoder accepts must pass EncodeProgram, and decode to the
// same program again.
func FuzzProgram(f *testing.F) {
	a, z := []byte("a"), []byte("z")
	data, err := EncodeProgram(Program{Epoch: 3, Steps: []Step{
		{Kind: StepPut, Key: a, Value: z, Lease: -5, PrevKV: true}, {Kind: StepPut, Key: a, IgnoreValue: true, IgnoreLease: true},
		{Kind: StepRange, Key: a, End: z, Range: RangeOptions{Revision: 3, Limit: 4, MaxBytes: 5, Reverse: true, KeysOnly: true}},
		{Kind: StepDelete, Key: a, End: []byte{0}, PrevKV: true}, {Kind: StepGrant, Lease: 1, TTL: 2}, {Kind: StepRevoke, Lease: 1},
		{Kind: StepRevoke, Lease: 1, Value: DigestKeys([][]byte{a})},
		{Kind: StepSetRecord, Key: a, Value: z}, {Kind: StepDeleteRecord, Key: a},
		{Kind: StepBranch, If: []Compare{{Key: a, End: z, Target: CompareMod, Relation: CompareNotEqual, Number: -1},
			{Key: a, Target: CompareValue, Value: z}}, Then: []Step{{Kind: StepBranch}}, Else: []Step{{Kind: StepRange, Key: a}}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data[2:])
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := new(programDecoder).decode(data)
		if err != nil || len(data) > MaxProgramBytes/2 {
			return
		}
		again, err := EncodeProgram(*p)
		require.NoError(t, err)
		back, err := new(programDecoder).decode(again[2:])
		require.NoError(t, err)
		require.Equal(t, p, back)
	})
}
