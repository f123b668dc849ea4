# Writes tests/golden/statistics/r.csv: Rscript --vanilla tests/golden/make_statistics.R tests/golden/statistics/r.csv
#
# Second opinions on the preservation bound, the power of a design and the net interval, from R's own distributions.
# The test that reads them needs no R.

path <- commandArgs(trailingOnly = TRUE)[1]
rows <- list()
add <- function(figure, lost, gained, total, limit, confidence, rate, value)
  rows[[length(rows) + 1]] <<- sprintf("%s,%s,%s,%s,%s,%s,%s,%.17g", figure, lost, gained, total, limit, confidence,
                                       rate, value)

for (pair in list(c(20, 1319), c(22, 1319), c(17, 1319), c(18, 1319), c(0, 149), c(0, 148), c(1, 100), c(2, 100),
                  c(0, 59), c(0, 1), c(7, 12), c(650, 1319), c(1318, 1319), c(5, 1000)))
  for (confidence in c(0.9, 0.95, 0.99)) {
    upper <- binom.test(pair[1], pair[2], alternative = "less", conf.level = confidence)$conf.int[2]
    lower <- binom.test(pair[1], pair[2], alternative = "greater", conf.level = confidence)$conf.int[1]
    add("upper", pair[1], "", pair[2], "", confidence, "", upper)
    add("lower", pair[1], "", pair[2], "", confidence, "", lower)
  }

# The largest count whose bound is below the limit; -1 where none is. A bound lies above the rate, so that no count above
# limit * total passes.
most <- function(total, limit, confidence) {
  counts <- 0:min(total - 1, ceiling(limit * total))
  sum(qbeta(confidence, counts + 1, total - counts) < limit) - 1
}

for (limit in c(0.01, 0.02, 0.05))
  for (total in c(58, 59, 100, 148, 149, 236, 500, 1000, 1319, 5000)) {
    count <- most(total, limit, 0.95)
    add("most", "", "", total, limit, 0.95, "", count)
    for (rate in c(0.001, 0.005, 0.01, 0.02))
      add("power", "", "", total, limit, 0.95, rate, pbinom(count, total, rate))
  }

# The smallest total from which on each one up to 4,000 passes with at least 0.9.
for (case in list(c(0.02, 0.001), c(0.02, 0.005), c(0.02, 0.01), c(0.05, 0.01), c(0.05, 0.02), c(0.02, 0.012))) {
  passes <- sapply(1:4000, function(total) pbinom(most(total, case[1], 0.95), total, case[2]) >= 0.9)
  add("smallest", "", "", "", case[1], 0.95, case[2], max(which(!passes)) + 1)
}

# P(net* <= k): given how many of the draws are losses, the gains among the others are binomial.
below <- function(k, lost, gained, total) {
  drawn <- 0:total
  sum(dbinom(drawn, total, lost / total) * pbinom(k + drawn, total - drawn, gained / (total - lost)))
}
for (case in list(c(20, 17, 1319), c(22, 15, 1319), c(1, 1, 100), c(5, 0, 160), c(0, 5, 160), c(30, 60, 200))) {
  shares <- sapply(-case[3]:case[3], function(k) below(k, case[1], case[2], case[3]))
  for (confidence in c(0.9, 0.95)) {
    add("net_lower", case[1], case[2], case[3], "", confidence, "", which(shares >= (1 - confidence) / 2)[1] - 1 - case[3])
    add("net_upper", case[1], case[2], case[3], "", confidence, "", which(shares >= (1 + confidence) / 2)[1] - 1 - case[3])
  }
}
for (k in c(-16, -15, 8, 9, 10)) add(sprintf("net_at_most_%d", k), 20, 17, 1319, "", "", "", below(k, 20, 17, 1319))

writeLines(c(paste0("# ", R.version.string, "; stats ", packageVersion("stats"), "; ", Sys.Date()),
             "figure,lost,gained,total,limit,confidence,rate,value", unlist(rows)), path)
