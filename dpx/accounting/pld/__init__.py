"""Privacy loss distributions: the loss of one step (`losses`), its composition over many (`composition`), and long
schedules rounded to few distinct steps (`buckets`)."""
